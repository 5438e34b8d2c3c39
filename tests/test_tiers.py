"""The two tiers of the tests: together all tests; the first samples every parametrized test."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers


class Item(SimpleNamespace):
    """The part of `pytest.Item` that the choice of a tier needs."""

    def get_closest_marker(self, name: str) -> Any:
        return self.sample if name == "sample" else None

    def add_marker(self, mark: Any) -> None:
        self.slow = mark.name == "slow"


def items(name: str, sets: int, count: int | None) -> list[Any]:
    sample = None if count is None else SimpleNamespace(args=(count,))
    return [Item(nodeid=f"test_x.py::{name}[{index}]", sample=sample, slow=False) for index in range(sets)]


@pytest.mark.parametrize(("sets", "count", "fast"), [(1, 1, 1), (5, 1, 1), (5, 2, 2), (7, 3, 3), (3, 3, 3), (3, 9, 3)])
def test_a_sample_is_spread_over_the_parameter_sets(sets: int, count: int, fast: int) -> None:
    test, second = items("test_a", sets, count), items("test_b", 2, None)
    tiers.mark_samples([*test, *second])
    chosen = [index for index, item in enumerate(test) if not item.slow]
    assert len(chosen) == fast
    assert chosen[0] == 0
    assert all(b - a <= -(-sets // fast) for a, b in itertools.pairwise(chosen))
    assert not any(item.slow for item in second)


def test_quick_profile_tries_fewer_examples_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "settings", SimpleNamespace(default=SimpleNamespace(max_examples=20)))
    assert [tiers.examples(count) for count in (1, 8, 100, 600)] == [1, 5, 20, 120]
    monkeypatch.setattr(tiers, "settings", SimpleNamespace(default=SimpleNamespace(max_examples=100)))
    assert [tiers.examples(count) for count in (1, 8, 100, 600)] == [1, 8, 100, 600]
