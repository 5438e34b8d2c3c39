"""Words for figures."""

from __future__ import annotations

import pytest

from optexport._utils.markup import times_as_fast


@pytest.mark.parametrize(
    ("speedup", "text"),
    [(0.981, "0.98 times as fast"), (1.4, "1.40 times as fast"), (173.57, "174 times as fast")],
)
def test_a_ratio_has_no_more_digits_than_it_deserves(speedup: float, text: str) -> None:
    assert times_as_fast(speedup, speedup * 0.97, speedup * 1.03) == text


def test_a_wide_interval_is_named() -> None:
    assert times_as_fast(1.4, 1.21, 1.5) == "1.40 (1.21 to 1.50) times as fast"
    assert times_as_fast(13.4, 12.1, 15.2) == "13 (12 to 15) times as fast"
