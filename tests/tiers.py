"""Splits the tests: ``make test`` skips slow tests, ``make test-all`` adds them, nightly tests run if asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings


def mark_samples(items: Sequence[pytest.Item]) -> None:
    """Marks parameter sets of a test as slow and nightly.

    ``sample(n)`` leaves `n` sets in the first tier and marks the others as slow. ``sample(n, m)`` leaves `m` sets in
    the two tiers, and marks the others as nightly. The chosen sets are evenly spread.
    """
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        sets = [item for item in group if not any(map(item.get_closest_marker, ("nightly", "system")))]
        marker = sets[0].get_closest_marker("sample") if sets else None
        if marker is None:
            continue
        fast, *both = marker.args
        for count, mark in [*((count, pytest.mark.nightly) for count in both), (fast, pytest.mark.slow)]:
            chosen = _spread(sets, count)
            for item in sets:
                if item not in chosen:
                    item.add_marker(mark)
            sets = chosen


def start_elsewhere(items: list[pytest.Item], commit: str) -> None:
    """Rotates the files of tests, by a number of files that depends on the commit."""
    files = [[*group] for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    first = int(commit[:8] or "0", 16) % max(1, len(files))
    items[:] = itertools.chain.from_iterable(files[first:] + files[:first])


def _spread(sets: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    share = [index * count // len(sets) for index in range(-1, len(sets))]
    return [item for item, (before, after) in zip(sets, itertools.pairwise(share), strict=True) if before != after]


def examples(count: int) -> int:
    """Returns how many examples a property test tries:

    `count` in the full hypothesis profile; a fifth in the quick one, but at least five if `count` is larger.
    """
    return max(min(count, 5), count * settings.default.max_examples // 100)
