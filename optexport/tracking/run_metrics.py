"""Metrics of a run: at most 40 numbers to compare runs by. The tables have all numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured
from optexport.bundle.parity_records import ParityRecord
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.run_params import METRIC_CHARACTERS, valid_names

# Name, value and step of a metric.
Metric: TypeAlias = tuple[str, float, int]

MAX_METRICS = 40
# Steps of a run whose time is a metric, with the times of all formats added up.
_TIMED_STEPS = ("load", "trace", "reference", "tune", "export", "check", "measure")


def bundle_metrics(bundle: BundleRecord) -> list[Metric]:
    """Returns the metrics of a bundle. The share of each target comes last, because there may be too many."""
    manifest, measured = bundle.manifest, bundle.measurements
    values = itertools.chain(
        _summary_values(manifest.parity),
        _file_values(manifest),
        _speed_values(measured),
        [("graph/changes", sum(len(record.changes) for record in manifest.transformations))],
        _time_values(measured),
        _gate_values(manifest.parity),
        _target_values(manifest.parity),
    )
    return [*_selected(values, MAX_METRICS - 1), *_node_counts(manifest)]


def failure_metrics(parity: ParityRecord) -> list[Metric]:
    """Returns the metrics of a failed check."""
    return _selected(
        itertools.chain(_summary_values(parity), _gate_values(parity), _target_values(parity)), MAX_METRICS
    )


def _selected(values: Iterable[tuple[str, float | None]], count: int) -> list[Metric]:
    """Returns the first finite values. MLflow stores infinity as another number."""
    finite = {name: float(value) for name, value in values if value is not None and math.isfinite(value)}
    named = valid_names(finite, METRIC_CHARACTERS)
    return [(name, value, 0) for name, value in itertools.islice(named.items(), count)]


def _summary_values(parity: ParityRecord) -> Iterator[tuple[str, float | None]]:
    yield "parity/passed", float(parity.passed)
    yield "parity/worst_share_of_tolerance", parity.used_share
    yield "parity/cases", len(parity.cases)


def _file_values(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for artifact in manifest.artifacts:
        yield f"files/{artifact.format}_mb", manifest.size_of(artifact) / 1e6
    yield "files/bundle_mb", sum(file.size for file in manifest.files) / 1e6


def _speed_values(measured: Measured) -> Iterator[tuple[str, float]]:
    for record in measured.gain:
        yield f"gain/{record.format}", record.speedup
    for outcome in measured.tune:
        if outcome.over_plain is not None:
            yield f"gain/{outcome.format}_over_plain_export", outcome.over_plain.speedup
    if measured.bench is None:
        return
    files = {file.name for file in measured.bench.artifacts if file.proven}
    figures = [figure for figure in measured.bench.figures if figure.artifact in files]
    first_figures = {figure.format: figure for figure in reversed(figures)}
    for name, figure in sorted(first_figures.items()):
        yield f"latency/{name}_ms", figure.p50_ms


def _time_values(measured: Measured) -> Iterator[tuple[str, float]]:
    yield "time/total_seconds", sum(measured.seconds.values())
    for name in _TIMED_STEPS:
        if times := [seconds for step, seconds in measured.seconds.items() if step.split(" ")[0] == name]:
            yield f"time/{name}_seconds", sum(times)


def _gate_values(parity: ParityRecord) -> Iterator[tuple[str, float]]:
    """Yields the smallest value of each gate on a metric."""
    smallest: dict[str, float] = {}
    for result in (result for target in parity.compared for result in target.gate_results):
        if result.value is not None:
            name = ".".join(part for part in (result.measure, result.output) if part)
            smallest[name] = min(result.value, smallest.get(name, math.inf))
    yield from ((f"gates/{name}", value) for name, value in smallest.items())


def _target_values(parity: ParityRecord) -> Iterator[tuple[str, float | None]]:
    yield from ((f"parity/{target.target}_share_of_tolerance", target.used_share) for target in parity.compared)


def _node_counts(manifest: Manifest) -> Iterator[Metric]:
    """Yields the nodes of the first file's graph: before all rules as step 0, then after each rule."""
    yield "graph/nodes", manifest.nodes_before, 0
    first = manifest.transformations[0].formats if manifest.transformations else []
    rules = [record for record in manifest.transformations if record.formats == first]
    yield from (("graph/nodes", record.nodes_after, step) for step, record in enumerate(rules, start=1))
