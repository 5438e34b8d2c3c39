"""Comparison of a new version with the champion, the version that holds the alias."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optexport.bundle.manifest import ArtifactRecord, DimRecord, Manifest, TensorRecord
from optexport.bundle.measurements import FigureRecord, Measured
from optexport.bundle.parity_records import DecisionRecord, OutputRecord, TargetRecord, ToleranceRecord
from optexport.config.registration import MaxRegressionConfig
from optexport.errors import short_line
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.plausibility import check_possible

# The default for a dimension that is missing from the manifest.
_FREE = DimRecord(min=1, max=None)
# Fields of the measurements that must agree before times are compared.
_MACHINE = ("host", "processor", "cpus")
# In characters. Names come from the model, and the champion's names from documents that anyone may have written.
_LONGEST_SIDE = 800
# A few units in the last place of float32, relative to the largest value. Smaller changes do not count.
_LEAST = 2.0**-21


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
    check_possible(champion)
    worse = [*_interface(new.manifest, champion.manifest), *_parity(new.manifest, champion.manifest, allowed.parity)]
    worse += _sizes(new.manifest, champion.manifest, allowed.size)
    missing = []
    if set(new.manifest.parity.cases) != set(champion.manifest.parity.cases):
        missing.append("parity on the same batches: the champion was proven on others")
    if (reason := _incomparable_times(new.measured, champion.measured)) is None:
        worse += _latency(new.measured, champion.measured, allowed.latency)
        missing += _untimed(new.measured, champion.measured)
    else:
        missing.append(f"latency: {reason}")
    ours, theirs = ({artifact.format for artifact in each.manifest.artifacts} for each in (new, champion))
    if only := sorted(ours ^ theirs):
        missing.append(f"{', '.join(only)}: only one of the two has the file")
    return Verdict(tuple(map(short_line, worse)), tuple(map(short_line, missing)))


def _interface(new: Manifest, champion: Manifest) -> Iterator[str]:
    """Yields changes of inputs, outputs and sizes that can break a caller of the alias."""
    for what in ("inputs", "outputs"):
        ours, theirs = (_told(getattr(each, what)) for each in (new, champion))
        if ours != theirs:
            yield f"{what}: {short_line(ours, _LONGEST_SIDE)}, the champion's {short_line(theirs, _LONGEST_SIDE)}"
    if _told(new.inputs) == _told(champion.inputs):
        yield from _ranges(new, champion)
        yield from _ties(new, champion)
    free = {artifact.format for artifact in champion.artifacts if artifact.fixed_shape is None}
    for artifact in new.artifacts:
        if artifact.fixed_shape is not None and artifact.format in free:
            yield f"inputs: {artifact.format} takes the traced sizes alone, the champion's others too"


def _axes(new: Manifest, champion: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yields each axis that is dynamic in both, such as ``x[1]``, with both size names."""
    for ours, theirs in zip(new.inputs, champion.inputs, strict=True):
        for axis, (size, other) in enumerate(zip(ours.shape, theirs.shape, strict=True)):
            if isinstance(size, str) and isinstance(other, str):
                yield f"{ours.name}[{axis}]", size, other


def _ranges(new: Manifest, champion: Manifest) -> Iterator[str]:
    for axis, size, other in _axes(new, champion):
        ours, theirs = _range(new, size), _range(champion, other)
        if ours[0] > theirs[0] or ours[1] < theirs[1]:
            told = (f"{low} or more" if high == math.inf else f"{low} to {high:g}" for low, high in (ours, theirs))
            yield "inputs: {} takes {}, the champion's {}".format(axis, *told)


def _range(manifest: Manifest, size: str) -> tuple[int, float]:
    """Returns the smallest and largest value of a size, which may be a sum of dimensions."""
    dims = [manifest.dims.get(name, _FREE) for name in size.split(" + ")]
    return sum(dim.min for dim in dims), sum(math.inf if dim.max is None else dim.max for dim in dims)


def _ties(new: Manifest, champion: Manifest) -> Iterator[str]:
    """Yields sizes that depend on earlier sizes, but only in the new version."""
    met: dict[str, tuple[str, str]] = {}
    axes = list(_axes(new, champion))
    for axis, size, other in axes:
        met.setdefault(size, (axis, other))
    for axis, size, other in axes:
        parts = [met[name] for name in size.split(" + ") if name in met]
        if len(parts) < len(size.split(" + ")):
            continue
        if sorted(other.split(" + ")) != sorted(name for _, theirs in parts for name in theirs.split(" + ")):
            yield f"inputs: {axis} is as long as {' + '.join(each for each, _ in parts)}, the champion's need not be"


def _told(records: Sequence[TensorRecord]) -> str:
    """Formats names, dtypes and sizes; every dynamic size is a question mark."""
    return "; ".join(
        f"{r.name} {r.dtype} [{', '.join(str(size) if isinstance(size, int) else '?' for size in r.shape)}]"
        for r in records
    )


def _parity(new: Manifest, champion: Manifest, allowed: float) -> Iterator[str]:
    theirs = {target.target: target for target in champion.parity.targets}
    for target in new.parity.targets:
        if (other := theirs.get(target.target)) is None:
            continue
        if target.precision is None and other.precision is None:
            yield from _distances(target, other, allowed, new.parity.bounds)
        elif target.precision == other.precision:
            yield from _decisions(target, other)
        else:
            precisions = (each.precision or "full precision" for each in (target, other))
            yield "parity: {} is of {}, the champion's of {}".format(target.target, *precisions)


def _distances(
    new: TargetRecord, champion: TargetRecord, allowed: float, bounds: Mapping[str, ToleranceRecord]
) -> Iterator[str]:
    theirs: dict[str, OutputRecord] = {output.output: output for output in champion.outputs}
    for output in new.outputs:
        if (other := theirs.get(output.output)) is None:
            continue
        where = f"parity: {new.target}, {output.output}"
        if output.multiple is not None and other.multiple is not None:
            if output.multiple > max(1.0, other.multiple * (1 + allowed)):
                yield f"{where}: {output.multiple:.3g} times the floor, the champion's {other.multiple:.3g}"
        elif bounds[output.output].fixed and output.max_abs is not None and other.max_abs is not None:
            # Without rounding the noise floor is zero, and the user's tolerance accepts any smaller distance. Without a
            # tolerance, the parity check limits the distance to a few units in the last place.
            least = _LEAST * (bounds[output.output].largest or 0.0)
            if output.max_abs > max(least, other.max_abs * (1 + allowed)):
                yield f"{where}: {output.max_abs:.3g} away, the champion's {other.max_abs:.3g}"


def _decisions(new: TargetRecord, champion: TargetRecord) -> Iterator[str]:
    """Compares a file of lower precision by each metric of the champion."""
    known: dict[tuple[str, str | None], DecisionRecord] = {(d.measure, d.output): d for d in new.decisions}
    for other in champion.decisions:
        if other.mean is None:
            continue
        ours = known.get((other.measure, other.output))
        if ours is None or ours.mean is None:
            yield (
                f"parity: {new.title}, {other.measure}{f' of {other.output}' if other.output else ''}: "
                f"this run demands none, the champion's {other.mean:.6g}"
            )
            continue
        # A mean with an interval is worse only if the two intervals do not overlap.
        least, reached = (other.mean, ours.mean) if other.low is None or ours.high is None else (other.low, ours.high)
        if reached < least:
            yield (
                f"parity: {new.title}, {ours.measure}{f' of {ours.output}' if ours.output else ''}: "
                f"{ours.mean:.6g}, the champion's {other.mean:.6g}"
            )


def _sizes(new: Manifest, champion: Manifest, allowed: float) -> Iterator[str]:
    theirs = {artifact.format: _size(champion, artifact) for artifact in champion.artifacts}
    for artifact in new.artifacts:
        ours, other = _size(new, artifact), theirs.get(artifact.format)
        if other is not None and ours > other * (1 + allowed):
            yield f"size: {artifact.format} takes {ours} bytes, the champion's {other}"


def _size(manifest: Manifest, artifact: ArtifactRecord) -> int:
    """Returns the bytes of a file, including external weights."""
    return sum(file.size for file in manifest.files if file.path in (artifact.path, f"{artifact.path}.data"))


def _incomparable_times(new: Measured, champion: Measured) -> str | None:
    """Returns why the times cannot be compared, or None."""
    if new.bench is None:
        return "this run measured none"
    if champion.bench is None:
        return "the champion's run measured none"
    for key in _MACHINE:
        ours, theirs = getattr(new, key), getattr(champion, key)
        if ours != theirs:
            return f"measured on another machine, whose {key} is {theirs}, here {ours}"
    if new.bench.threads != champion.bench.threads:
        return f"measured with {new.bench.threads} threads, the champion with {champion.bench.threads}"
    if not list(_pairs(new, champion)):
        return "no file was measured at the same sizes, in enough rounds for an interval"
    return None


def _pairs(new: Measured, champion: Measured) -> Iterator[tuple[FigureRecord, FigureRecord]]:
    """Yields both figures for each file and shape that have an interval in both."""
    ours, theirs = (_with_interval(each) for each in (new, champion))
    yield from ((row, theirs[target]) for target, row in ours.items() if target in theirs)


def _with_interval(measured: Measured) -> dict[tuple[str, str], FigureRecord]:
    rows = [] if measured.bench is None else measured.bench.figures
    return {(row.artifact, row.shape): row for row in rows if row.low_ms is not None and row.high_ms is not None}


def _untimed(new: Measured, champion: Measured) -> Iterator[str]:
    rows = [row for each in (new, champion) if each.bench is not None for row in each.bench.figures]
    both = _with_interval(new).keys() & _with_interval(champion).keys()
    left = dict.fromkeys((row.artifact, row.shape) for row in rows if (row.artifact, row.shape) not in both)
    if left:
        told = ", ".join(f"{artifact} at {shape}" for artifact, shape in left)
        yield f"latency: {told}: not measured by both, in enough rounds for an interval"


def _latency(new: Measured, champion: Measured, allowed: float) -> Iterator[str]:
    for ours, theirs in _pairs(new, champion):
        assert ours.low_ms is not None
        assert theirs.high_ms is not None
        if ours.low_ms > theirs.high_ms * (1 + allowed):
            taken, other = (f"{row.p50_ms:.4g} ms ({row.low_ms:.4g} to {row.high_ms:.4g})" for row in (ours, theirs))
            yield f"latency: {ours.artifact} at {ours.shape} takes {taken}, the champion's {other}"
