"""Measures artifacts on every workload, and compares those that are to be compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from optexport.bench.artifact import Artifact
from optexport.bench.comparison import Comparison, compare, interval, percentiles
from optexport.bench.turns import Settings, Timing, race
from optexport.bench.workload import Workload
from optexport.config.benchmarks import LEAST_ROUNDS
from optexport.errors import BenchError

Pair = tuple[Artifact, Artifact]


@dataclass(frozen=True)
class Figures:
    """What an artifact takes on one workload; times are in seconds, memory is in bytes.

    Attributes:
        low: The lower end of the 95 % interval of the median turn; None of fewer rounds than make one.
        high: Its upper end.
    """

    artifact: Artifact
    workload: Workload
    p50: float
    p90: float
    p99: float
    low: float | None
    high: float | None
    rows_per_second: float
    load: float
    peak_memory: int | None


@dataclass(frozen=True)
class PairwiseComparison:
    """How an artifact compares with its baseline on one workload."""

    artifact: Artifact
    baseline: Artifact
    workload: Workload
    comparison: Comparison


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        notes: What had to be taken for granted, and what was not measured.
    """

    settings: Settings
    figures: tuple[Figures, ...]
    duels: tuple[PairwiseComparison, ...]
    notes: tuple[str, ...] = ()


def pairs_of(artifacts: Sequence[Artifact], baselines: Sequence[Artifact]) -> list[Pair]:
    """Which are compared: an artifact with each baseline of its format, or with all where none is of it.

    Without baselines the first artifact of a format is that of the others.
    """
    found: list[Pair] = []
    for index, artifact in enumerate(artifacts):
        same = [baseline for baseline in baselines if baseline.format == artifact.format]
        if not baselines:
            same = [other for other in artifacts[:index] if other.format == artifact.format][:1]
        found += [(artifact, baseline) for baseline in same or baselines]
    return found


def measure(
    artifacts: Sequence[Artifact],
    workloads: Sequence[Workload],
    pairs: Sequence[Pair],
    settings: Settings,
    announce: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures artifacts; those that are compared take turns.

    Args:
        announce: Is told of every workload and artifact before it is measured.

    Raises:
        BenchError: One of them cannot be run.
    """
    timings: list[Timing] = []
    notes = []
    for workload in workloads:
        fixed = [artifact for artifact in artifacts if artifact.fixed and not workload.traced]
        notes += [f"{artifact.name}: not at {workload.label}, since its shape is fixed" for artifact in fixed]
        for group in _groups([artifact for artifact in artifacts if artifact not in fixed], pairs):
            announce(f"{workload.label}: {', '.join(artifact.name for artifact in group)}")
            try:
                timings += race(group, [workload], settings)
            except BenchError as error:
                if len(workloads) == 1:
                    raise
                raise BenchError(f"at {workload.label} {error.message}", location=error.location) from error
    by_place = {(timing.artifact, timing.workload.label): timing for timing in timings}
    duels = []
    for workload in workloads:
        for artifact, baseline in pairs:
            ours, theirs = (by_place.get((one, workload.label)) for one in (artifact, baseline))
            if ours is not None and theirs is not None:
                duels.append(PairwiseComparison(artifact, baseline, workload, compare(theirs.medians, ours.medians)))
    return Report(settings, tuple(_figures(timing) for timing in timings), tuple(duels), tuple(notes))


def _groups(artifacts: Sequence[Artifact], pairs: Sequence[Pair]) -> list[list[Artifact]]:
    """Artifacts that are compared, directly or by way of others, together; all others alone."""
    groups = [[artifact] for artifact in artifacts]
    for pair in pairs:
        touched = [group for group in groups if not set(pair).isdisjoint(group)]
        if len(touched) > 1:
            groups = [group for group in groups if group not in touched] + [
                [artifact for group in touched for artifact in group]
            ]
    return groups


def _figures(timing: Timing) -> Figures:
    p50, p90, p99 = percentiles(timing.calls)
    logs, low, high = np.log(np.asarray(timing.medians, dtype=np.float64)), None, None
    if logs.size >= LEAST_ROUNDS:
        low, high = (math.exp(end) for end in interval(logs))
    return Figures(
        timing.artifact,
        timing.workload,
        p50,
        p90,
        p99,
        low,
        high,
        timing.workload.rows / statistics.fmean(timing.calls),
        statistics.median(timing.load_seconds),
        timing.peak_memory,
    )
