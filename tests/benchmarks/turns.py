"""Times calls that take turns in one process, for alternatives that run in the same runtime."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

# Seconds of a turn at least, so that one interruption does not dominate it.
_SECONDS = 0.3


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the median seconds of each call in every round, in a changing order, after three warm-up calls."""
    for call in calls.values():
        for _ in range(3):  # TorchScript optimizes at the second call, a compiler at the first
            call()
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key in random.sample(list(calls), len(calls)):
            times[key].append(_turn(calls[key]))
    return times


def _turn(call: Callable[[], object]) -> float:
    samples: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not samples or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
