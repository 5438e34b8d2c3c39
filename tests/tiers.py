"""Splits the tests into two tiers: ``make test`` skips slow tests, ``make test-all`` runs everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings


def mark_samples(items: Sequence[pytest.Item]) -> None:
    """Marks the parameter sets that ``sample(n)`` leaves out as slow: all but `n` of a test, evenly spread."""
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        sets = [item for item in group if not any(map(item.get_closest_marker, ("nightly", "system")))]
        if not sets:
            continue
        marker = sets[0].get_closest_marker("sample")
        count = marker.args[0] if marker else len(sets)
        for index, item in enumerate(sets):
            if index and index * count // len(sets) == (index - 1) * count // len(sets):
                item.add_marker(pytest.mark.slow)


def examples(count: int) -> int:
    """Returns how many examples a property test tries:

    `count` in the full hypothesis profile, a fifth in the quick one.
    """
    return max(min(count, 5), count * settings.default.max_examples // 100)
