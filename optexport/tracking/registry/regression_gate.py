"""Comparison of a new version with the champion, the version that holds the alias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optexport._utils.size_ranges import describe_range
from optexport.bundle.manifest import DimRecord, Manifest, TensorRecord
from optexport.bundle.measurements import FigureRecord, Measured
from optexport.bundle.parity_records import GateResultRecord, OutputRecord, TargetRecord, ToleranceRecord
from optexport.config.registration import MaxRegressionConfig
from optexport.errors import short_line
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.plausibility import check_plausible

# The default for a dimension that is missing from the manifest.
_ANY_SIZE = DimRecord(min=1, max=None)
# Fields of the measurements that must agree before times are compared.
_MACHINE = ("host", "processor", "cpus")
# In characters. Names come from the model, and the champion's names from documents that anyone may have written.
_MAX_INTERFACE = 800
# A few units in the last place of float32, relative to the largest value. Smaller changes do not count.
_MIN_DISTANCE = 2.0**-21


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        worse: The regressions, each with both figures. The alias moves if there are none.
        not_compared: The parts that could not be compared, each with its reason.
    """

    worse: tuple[str, ...]
    not_compared: tuple[str, ...]


def compare(new: BundleRecord, champion: BundleRecord, allowed: MaxRegressionConfig) -> Verdict:
    """Compares everything that both bundles have.

    Raises:
        BundleError: The figures of the champion are not plausible.
    """
    check_plausible(champion)
    worse = [
        *_compare_interfaces(new.manifest, champion.manifest),
        *_compare_parity(new.manifest, champion.manifest, allowed.parity),
    ]
    worse += _compare_sizes(new.manifest, champion.manifest, allowed.size)
    missing = []
    if set(new.manifest.parity.cases) != set(champion.manifest.parity.cases):
        missing.append("parity on the same cases: the champion was checked on other cases")
    if (problem := _find_timing_problem(new.measurements, champion.measurements)) is None:
        worse += _compare_latency(new.measurements, champion.measurements, allowed.latency)
        missing += _untimed_files(new.measurements, champion.measurements)
    else:
        missing.append(f"latency: {problem}")
    ours, theirs = ({artifact.format for artifact in bundle.manifest.artifacts} for bundle in (new, champion))
    if unpaired := sorted(ours ^ theirs):
        missing.append(f"{', '.join(unpaired)}: only one of the two versions has this format")
    return Verdict(tuple(map(short_line, worse)), tuple(map(short_line, missing)))


def _compare_interfaces(new: Manifest, champion: Manifest) -> Iterator[str]:
    """Yields changes of inputs, outputs and sizes that can break a caller of the alias."""
    for side in ("inputs", "outputs"):
        ours, theirs = (_describe(getattr(manifest, side)) for manifest in (new, champion))
        if ours != theirs:
            yield f"{side}: {short_line(ours, _MAX_INTERFACE)} (champion: {short_line(theirs, _MAX_INTERFACE)})"
    if _describe(new.inputs) == _describe(champion.inputs):
        yield from _compare_ranges(new, champion)
        yield from _compare_ties(new, champion)
    dynamic = {artifact.format for artifact in champion.artifacts if artifact.fixed_shape is None}
    for artifact in new.artifacts:
        if artifact.fixed_shape is not None and artifact.format in dynamic:
            yield f"inputs: {artifact.format} accepts only the traced sizes (champion: other sizes too)"


def _axes(new: Manifest, champion: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yields each axis that is dynamic in both, such as ``x[1]``, with both size names."""
    for ours, theirs in zip(new.inputs, champion.inputs, strict=True):
        for axis, (our_size, their_size) in enumerate(zip(ours.shape, theirs.shape, strict=True)):
            if isinstance(our_size, str) and isinstance(their_size, str):
                yield f"{ours.name}[{axis}]", our_size, their_size


def _compare_ranges(new: Manifest, champion: Manifest) -> Iterator[str]:
    for axis, our_size, their_size in _axes(new, champion):
        ours, theirs = _range(new, our_size), _range(champion, their_size)
        if ours[0] > theirs[0] or ours[1] < theirs[1] or theirs[2] % ours[2]:
            yield f"inputs: {axis} accepts {describe_range(*ours)} (champion: {describe_range(*theirs)})"


def _range(manifest: Manifest, size: str) -> tuple[int, float, int]:
    """Returns the smallest and largest value of a size, which may be a sum, and what it is a multiple of."""
    dims = [manifest.dims.get(name, _ANY_SIZE) for name in size.split(" + ")]
    largest = sum(math.inf if dim.max is None else dim.max for dim in dims)
    return sum(dim.min for dim in dims), largest, math.gcd(*(dim.multiple_of for dim in dims))


def _compare_ties(new: Manifest, champion: Manifest) -> Iterator[str]:
    """Yields sizes that depend on earlier sizes, but only in the new version."""
    # The first axis of each of our sizes, with the size of the champion there.
    first_axes: dict[str, tuple[str, str]] = {}
    axes = list(_axes(new, champion))
    for axis, our_size, their_size in axes:
        first_axes.setdefault(our_size, (axis, their_size))
    for axis, our_size, their_size in axes:
        names = our_size.split(" + ")
        parts = [first_axes[name] for name in names if name in first_axes]
        if len(parts) < len(names):
            continue
        if sorted(their_size.split(" + ")) != sorted(name for _, theirs in parts for name in theirs.split(" + ")):
            tied = " + ".join(first_axis for first_axis, _ in parts)
            yield f"inputs: {axis} must be as long as {tied} (champion: independent)"


def _describe(records: Sequence[TensorRecord]) -> str:
    """Formats names, dtypes and sizes; every dynamic size is a question mark."""
    return "; ".join(
        f"{r.name} {r.dtype} [{', '.join(str(size) if isinstance(size, int) else '?' for size in r.shape)}]"
        for r in records
    )


def _compare_parity(new: Manifest, champion: Manifest, allowed: float) -> Iterator[str]:
    theirs = {target.target: target for target in champion.parity.targets}
    for target in new.parity.targets:
        if (champion_target := theirs.get(target.target)) is None:
            continue
        if target.precision is None and champion_target.precision is None:
            yield from _compare_distances(target, champion_target, allowed, new.parity.bounds)
        elif target.precision == champion_target.precision:
            yield from _compare_metrics(target, champion_target)
        else:
            precisions = (record.precision or "full precision" for record in (target, champion_target))
            yield "parity: {} is in {} (champion: {})".format(target.target, *precisions)


def _compare_distances(
    new: TargetRecord, champion: TargetRecord, allowed: float, bounds: Mapping[str, ToleranceRecord]
) -> Iterator[str]:
    outputs: dict[str, OutputRecord] = {output.output: output for output in champion.outputs}
    for ours in new.outputs:
        if (theirs := outputs.get(ours.output)) is None:
            continue
        prefix = f"parity: {new.target}, {ours.output}"
        if ours.floor_ratio is not None and theirs.floor_ratio is not None:
            if ours.floor_ratio > max(1.0, theirs.floor_ratio * (1 + allowed)):
                yield f"{prefix}: {ours.floor_ratio:.3g} times the noise floor (champion: {theirs.floor_ratio:.3g})"
        elif bounds[ours.output].fixed and ours.max_abs is not None and theirs.max_abs is not None:
            # Without rounding the noise floor is zero, and the user's tolerance accepts any smaller distance. Without a
            # tolerance, the parity check limits the distance to a few units in the last place.
            minimum = _MIN_DISTANCE * (bounds[ours.output].largest or 0.0)
            if ours.max_abs > max(minimum, theirs.max_abs * (1 + allowed)):
                yield f"{prefix}: distance {ours.max_abs:.3g} (champion: {theirs.max_abs:.3g})"


def _compare_metrics(new: TargetRecord, champion: TargetRecord) -> Iterator[str]:
    """Compares a file of lower precision by each metric of the champion."""
    metrics: dict[tuple[str, str | None], GateResultRecord] = {(d.measure, d.output): d for d in new.gate_results}
    for theirs in champion.gate_results:
        if theirs.mean is None:
            continue
        prefix = f"parity: {new.title}, {theirs.measure}{f' of {theirs.output}' if theirs.output else ''}"
        ours = metrics.get((theirs.measure, theirs.output))
        if ours is None or ours.mean is None:
            yield f"{prefix}: not measured in this run (champion: {theirs.mean:.6g})"
            continue
        # A mean with an interval is worse only if the two intervals do not overlap.
        if theirs.low is None or ours.high is None:
            minimum, reached = theirs.mean, ours.mean
        else:
            minimum, reached = theirs.low, ours.high
        if reached < minimum:
            yield f"{prefix}: {ours.mean:.6g} (champion: {theirs.mean:.6g})"


def _compare_sizes(new: Manifest, champion: Manifest, allowed: float) -> Iterator[str]:
    theirs = {artifact.format: champion.size_of(artifact) for artifact in champion.artifacts}
    for artifact in new.artifacts:
        size, limit = new.size_of(artifact), theirs.get(artifact.format)
        if limit is not None and size > limit * (1 + allowed):
            yield f"size: {artifact.format} has {size} bytes (champion: {limit})"


def _find_timing_problem(new: Measured, champion: Measured) -> str | None:
    """Returns the reason why the times cannot be compared, or None."""
    if new.bench is None:
        return "this run has no benchmark"
    if champion.bench is None:
        return "the champion has no benchmark"
    for key in _MACHINE:
        ours, theirs = getattr(new, key), getattr(champion, key)
        if ours != theirs:
            return f"measured on another machine, with {key} {ours} (champion: {theirs})"
    if new.bench.threads != champion.bench.threads:
        return f"measured with {new.bench.threads} threads (champion: {champion.bench.threads})"
    if not list(_pairs(new, champion)):
        return "no file was measured in both runs at the same sizes, with enough rounds for an interval"
    return None


def _pairs(new: Measured, champion: Measured) -> Iterator[tuple[FigureRecord, FigureRecord]]:
    """Yields the new and the champion's figures for each file and shape that have an interval in both."""
    ours, theirs = (_with_interval(measurements) for measurements in (new, champion))
    yield from ((row, theirs[key]) for key, row in ours.items() if key in theirs)


def _with_interval(measurements: Measured) -> dict[tuple[str, str], FigureRecord]:
    rows = [] if measurements.bench is None else measurements.bench.figures
    return {(row.artifact, row.shape): row for row in rows if row.low_ms is not None and row.high_ms is not None}


def _untimed_files(new: Measured, champion: Measured) -> Iterator[str]:
    benches = [measurements.bench for measurements in (new, champion) if measurements.bench is not None]
    rows = [row for bench in benches for row in bench.figures]
    both = _with_interval(new).keys() & _with_interval(champion).keys()
    missing = dict.fromkeys((row.artifact, row.shape) for row in rows if (row.artifact, row.shape) not in both)
    if missing:
        names = ", ".join(f"{artifact} at {shape}" for artifact, shape in missing)
        yield f"latency: {names}: not measured in both runs with enough rounds for an interval"


def _compare_latency(new: Measured, champion: Measured, allowed: float) -> Iterator[str]:
    for ours, theirs in _pairs(new, champion):
        assert ours.low_ms is not None
        assert theirs.high_ms is not None
        if ours.low_ms > theirs.high_ms * (1 + allowed):
            new_time, champion_time = (
                f"{row.p50_ms:.4g} ms ({row.low_ms:.4g} to {row.high_ms:.4g})" for row in (ours, theirs)
            )
            yield f"latency: {ours.artifact} at {ours.shape} takes {new_time}, the champion {champion_time}"
