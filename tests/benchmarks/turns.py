"""Calls that take turns in one process, where what is compared runs in one runtime anyway."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

# A turn lasts at least so long, so that one interruption does not make it.
_SECONDS = 0.3


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The median seconds of each call in every round, in an order that changes, after three calls to warm up."""
    for call in calls.values():
        for _ in range(3):  # TorchScript optimises at the second, a compiler at the first
            call()
    found: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key in random.sample(list(calls), len(calls)):
            found[key].append(_turn(calls[key]))
    return found


def _turn(call: Callable[[], object]) -> float:
    samples: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not samples or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
