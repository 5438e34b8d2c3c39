"""Measures artifacts on every workload, and compares pairs of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from optexport.bench.artifact import Artifact
from optexport.bench.comparison import compare, interval, percentiles
from optexport.bench.report import Figures, PairwiseComparison, Report
from optexport.bench.turns import Settings, Timing, race
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import LEAST_ROUNDS
from optexport.errors import BenchError

Pair = tuple[Artifact, Artifact]

# Launches that a verdict needs.
_FEW_LAUNCHES = 4


def choose_pairs(artifacts: Sequence[Artifact], baselines: Sequence[Artifact]) -> list[Pair]:
    """Pairs each artifact with the baselines of its format, or with all if there are none.

    Without baselines, the first artifact of a format is the baseline of the others of the format. The first artifact of
    all is the baseline of the first ones of the other formats.
    """
    pairs: list[Pair] = []
    for index, artifact in enumerate(artifacts):
        same_format = [baseline for baseline in baselines if baseline.format == artifact.format]
        if not baselines:
            earlier = artifacts[:index]
            same_format = ([item for item in earlier if item.format == artifact.format] or [*earlier])[:1]
        pairs += [(artifact, baseline) for baseline in same_format or baselines]
    return pairs


def measure(
    artifacts: Sequence[Artifact],
    workloads: Sequence[Workload],
    pairs: Sequence[Pair],
    settings: Settings,
    announce: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures artifacts; compared artifacts take turns.

    Args:
        artifacts: Files to measure.
        workloads: Inputs to measure them on.
        pairs: Pairs of artifact and baseline to compare.
        settings: Threads, rounds and seconds.
        announce: Called before each workload and group of artifacts.

    Raises:
        BenchError: An artifact cannot run.
    """
    timings: list[Timing] = []
    notes = []
    for workload in workloads:
        fixed = [artifact for artifact in artifacts if artifact.fixed and not workload.traced]
        notes += [f"{artifact.name}: not measured at {workload.label}, its shape is fixed" for artifact in fixed]
        for group in _group([artifact for artifact in artifacts if artifact not in fixed], pairs):
            announce(f"{workload.label}: {', '.join(artifact.name for artifact in group)}")
            try:
                timings += race(group, [workload], _group_settings(group, pairs, settings))
            except BenchError as error:
                if len(workloads) == 1:
                    raise
                raise BenchError(f"at {workload.label}: {error.message}", location=error.location) from error
    by_artifact = {(timing.artifact, timing.workload.label): timing for timing in timings}
    comparisons = []
    for workload in workloads:
        for artifact, baseline in pairs:
            times, baseline_times = (by_artifact.get((item, workload.label)) for item in (artifact, baseline))
            if times is not None and baseline_times is not None:
                comparisons.append(
                    PairwiseComparison(artifact, baseline, workload, compare(baseline_times.medians, times.medians))
                )
    return Report(settings, tuple(_figures(timing) for timing in timings), tuple(comparisons), tuple(notes))


def _group(artifacts: Sequence[Artifact], pairs: Sequence[Pair]) -> list[list[Artifact]]:
    """Groups artifacts that are compared with each other, directly or indirectly."""
    groups = [[artifact] for artifact in artifacts]
    for pair in pairs:
        connected = [group for group in groups if not set(pair).isdisjoint(group)]
        if len(connected) > 1:
            merged = [artifact for artifact in artifacts if any(artifact in group for group in connected)]
            groups = [*(group for group in groups if group not in connected), merged]
    return groups


def _group_settings(group: Sequence[Artifact], pairs: Sequence[Pair], settings: Settings) -> Settings:
    """Returns settings with fewer restarts if only different formats are compared.

    Formats differ by more than the few percent that a restart changes, and starting all runtimes takes long.
    """
    if any(artifact.format == baseline.format for artifact, baseline in pairs if artifact in group):
        return settings
    return replace(settings, rounds_per_launch=max(settings.rounds_per_launch, -(-settings.rounds // _FEW_LAUNCHES)))


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
