"""Measures candidates in rungs, and compares any two on the rungs that both ran in."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from optexport.bench.artifact import Artifact
from optexport.bench.comparison import compare
from optexport.bench.turns import Settings, Timing, race
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Comparison
from optexport.tuning.candidate import Candidate

Race = Callable[[Sequence[Artifact], Sequence[Workload], Settings], list[Timing]]

# More than in a benchmark, because starts take most of the time, and four launches give a verdict.
ROUNDS_PER_LAUNCH = 3
# Seconds that one launch of one file takes with its turns, until it is measured: mostly the import of a runtime.
_INITIAL_COST = 2.0


class Tournament:
    """The measurements of one format's candidates.

    Args:
        workloads: Inputs to measure on.
        threads: Threads of each file.
        race: Measures files in turns.
        clock: Returns the time in seconds.

    Attributes:
        rungs: Number of rungs so far.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        threads: int,
        race: Race = race,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workloads, self.threads, self.rungs, self.clock = workloads, threads, 0, clock
        self._race = race
        self._seconds: dict[tuple[int, str, Candidate], npt.NDArray[np.float64]] = {}
        self._cost = _INITIAL_COST

    def cost(self, files: int, rounds: int) -> float:
        """Estimates the seconds of a rung."""
        return files * -(-rounds // ROUNDS_PER_LAUNCH) * self._cost

    def change_workloads(self, workloads: Sequence[Workload]) -> None:
        """Measures on other inputs from now on, and forgets all times."""
        self._cost *= len(workloads) / len(self.workloads)
        self.workloads, self.rungs = workloads, 0
        self._seconds.clear()

    def rung(self, field: Mapping[Candidate, Artifact], rounds: int, deadline: float = math.inf) -> None:
        """Runs a rung: each round gives each file a turn on each workload.

        Args:
            field: The files by candidate.
            rounds: Number of rounds, if there is time for them.
            deadline: When the rung must be done; at least one launch is made.

        Raises:
            BenchError: A file cannot run.
        """
        start = self.clock()
        settings = Settings(self.threads, rounds, rounds_per_launch=ROUNDS_PER_LAUNCH, deadline=deadline)
        timings = self._race(list(field.values()), self.workloads, settings)
        for timing, candidate in zip(timings, itertools.cycle(field), strict=False):
            self._seconds[self.rungs, timing.workload.label, candidate] = np.array(timing.medians)
        self._cost = (self.clock() - start) / (len(field) * len(timings[0].turns))
        self.rungs += 1

    def compare(self, baseline: Candidate, candidate: Candidate, *, last: bool = False) -> Comparison:
        """Compares two candidates over all workloads, by the geometric mean of their times.

        Args:
            baseline: The candidate to compare with.
            candidate: The candidate to judge.
            last: True to use only the last rung, whose times did not decide who ran in it.
        """
        rungs = self._find_shared_rungs(baseline, candidate, last=last)
        return compare(*(np.concatenate([self._mean(rung, item) for rung in rungs]) for item in (baseline, candidate)))

    def compare_at(self, workload: Workload, baseline: Candidate, candidate: Candidate) -> Comparison:
        """Compares two candidates on one workload, by the last rung."""
        (rung,) = self._find_shared_rungs(baseline, candidate, last=True)
        return compare(*(self._seconds[rung, workload.label, item] for item in (baseline, candidate)))

    def _mean(self, rung: int, candidate: Candidate) -> npt.NDArray[np.float64]:
        seconds = np.array([self._seconds[rung, workload.label, candidate] for workload in self.workloads])
        return np.exp(np.log(seconds).mean(axis=0))  # type: ignore[no-any-return]

    def has_run(self, candidate: Candidate) -> bool:
        """Returns True if a candidate ran in any rung."""
        return any(candidate == runner for _, _, runner in self._seconds)

    def has_run_last(self, candidate: Candidate) -> bool:
        """Returns True if a candidate ran in the last rung."""
        return any((rung, runner) == (self.rungs - 1, candidate) for rung, _, runner in self._seconds)

    def _find_shared_rungs(self, a: Candidate, b: Candidate, *, last: bool) -> list[int]:
        rungs = [self.rungs - 1] if last else range(self.rungs)
        label = self.workloads[0].label
        return [rung for rung in rungs if all((rung, label, item) in self._seconds for item in (a, b))]
