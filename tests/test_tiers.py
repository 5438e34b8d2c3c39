"""The tiers of the tests: the first samples every parametrized test, the second adds slow tests."""

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
        setattr(self, mark.name, True)


def items(name: str, sets: int, *counts: int) -> list[Any]:
    sample = SimpleNamespace(args=counts) if counts else None
    nodes = [f"test_x.py::{name}[{index}]" for index in range(sets)]
    return [Item(nodeid=node, sample=sample, slow=False, nightly=False) for node in nodes]


@pytest.mark.parametrize(("sets", "count", "fast"), [(1, 1, 1), (5, 1, 1), (5, 2, 2), (7, 3, 3), (3, 3, 3), (3, 9, 3)])
def test_a_sample_is_spread_over_the_parameter_sets(sets: int, count: int, fast: int) -> None:
    test, second = items("test_a", sets, count), items("test_b", 2)
    tiers.mark_samples([*test, *second])
    chosen = [index for index, item in enumerate(test) if not item.slow]
    assert len(chosen) == fast
    assert chosen[0] == 0
    assert all(b - a <= -(-sets // fast) for a, b in itertools.pairwise(chosen))
    assert not any(item.slow for item in second)


def test_parameter_sets_beyond_both_tiers_are_nightly() -> None:
    test = items("test_a", 20, 2, 5)
    tiers.mark_samples(test)
    assert sum(item.nightly for item in test) == 15
    assert sum(item.slow for item in test if not item.nightly) == 3
    assert not test[0].slow


def test_quick_profile_tries_fewer_examples_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "settings", SimpleNamespace(default=SimpleNamespace(max_examples=20)))
    assert [tiers.examples(count) for count in (1, 8, 100, 600)] == [1, 5, 20, 120]
    monkeypatch.setattr(tiers, "settings", SimpleNamespace(default=SimpleNamespace(max_examples=100)))
    assert [tiers.examples(count) for count in (1, 8, 100, 600)] == [1, 8, 100, 600]


def test_each_commit_starts_with_another_file() -> None:
    def order(commit: str) -> str:
        items: list[Any] = [SimpleNamespace(nodeid=f"{file}.py::test_{test}") for file in "abc" for test in "12"]
        tiers.start_elsewhere(items, commit)
        return "".join(item.nodeid[0] + item.nodeid[-1] for item in items)

    assert order("") == order("00000003ffff") == "a1a2b1b2c1c2"
    assert order("00000001ffff") == "b1b2c1c2a1a2"
    assert order("00000005ffff") == "c1c2a1a2b1b2"
