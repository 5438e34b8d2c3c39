"""Words for figures."""

from __future__ import annotations

import pytest

from optexport._utils.markup import times_as_fast


@pytest.mark.parametrize(
    ("speedup", "text"),
    [(0.981, "0.98 times as fast"), (1.4, "1.40 times as fast"), (173.57, "174 times as fast")],
)
def test_a_ratio_has_no_more_digits_than_it_deserves(speedup: float, text: str) -> None:
    assert times_as_fast(speedup) == text
