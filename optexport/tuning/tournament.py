"""Lets files race in heats, and compares any two on the heats that both of them ran."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from optexport.bench.artifact import Artifact
from optexport.bench.comparison import Comparison, compare
from optexport.bench.turns import ROUNDS_PER_LAUNCH, Settings, Timing, race
from optexport.bench.workload import Workload
from optexport.tuning.candidate import Recipe

Race = Callable[[Sequence[Artifact], Sequence[Workload], Settings], list[Timing]]

# Until it is measured: seconds that one start of one file takes with its turns.
_GUESS = 2.0


class Contest:
    """The races of one format.

    Args:
        race: How files race.

    Attributes:
        rungs: How many were run.
    """

    def __init__(self, workloads: Sequence[Workload], threads: int, race: Race = race) -> None:
        self.workloads, self.threads, self.rungs = workloads, threads, 0
        self._race = race
        self._seconds: dict[tuple[int, str, Recipe], npt.NDArray[np.float64]] = {}
        self._cost = _GUESS

    def cost(self, files: int, rounds: int) -> float:
        """Seconds that a heat of so many files and rounds will probably take."""
        return files * -(-rounds // ROUNDS_PER_LAUNCH) * self._cost

    def rung(self, field: Mapping[Recipe, Artifact], rounds: int) -> None:
        """Lets files race; each round gives each of them a turn on each workload.

        Raises:
            BenchError: One of them cannot be run.
        """
        start = time.monotonic()
        timings = self._race(list(field.values()), self.workloads, Settings(self.threads, rounds))
        for timing, recipe in zip(timings, itertools.cycle(field), strict=False):
            self._seconds[self.rungs, timing.workload.label, recipe] = np.array(timing.medians)
        self._cost *= (time.monotonic() - start) / self.cost(len(field), rounds)
        self.rungs += 1

    def compare(self, baseline: Recipe, candidate: Recipe, *, last: bool = False) -> Comparison:
        """Compares two files over all workloads, by the geometric mean of their times.

        Args:
            last: Whether by the last heat alone, whose times had no say in what was let into it.
        """
        rungs = self._shared(baseline, candidate, last=last)
        return compare(*(np.concatenate([self._mean(rung, one) for rung in rungs]) for one in (baseline, candidate)))

    def compare_at(self, workload: Workload, baseline: Recipe, candidate: Recipe) -> Comparison:
        """Compares two files on one workload, by the last heat."""
        (rung,) = self._shared(baseline, candidate, last=True)
        return compare(*(self._seconds[rung, workload.label, one] for one in (baseline, candidate)))

    def _mean(self, rung: int, recipe: Recipe) -> npt.NDArray[np.float64]:
        seconds = np.array([self._seconds[rung, workload.label, recipe] for workload in self.workloads])
        return np.exp(np.log(seconds).mean(axis=0))  # type: ignore[no-any-return]

    def ran(self, recipe: Recipe) -> bool:
        """Whether a file ran in any heat."""
        return any(recipe == one for _, _, one in self._seconds)

    def ran_last(self, recipe: Recipe) -> bool:
        """Whether a file ran in the last heat."""
        return any((rung, recipe) == (self.rungs - 1, one) for rung, _, one in self._seconds)

    def _shared(self, one: Recipe, other: Recipe, *, last: bool) -> list[int]:
        rungs = [self.rungs - 1] if last else range(self.rungs)
        label = self.workloads[0].label
        return [rung for rung in rungs if all((rung, label, recipe) in self._seconds for recipe in (one, other))]
