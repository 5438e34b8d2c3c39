"""Checks the gates of ``[gate]``: size, latency and speedup of exported files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from optexport.bench.artifact import Artifact
from optexport.bench.report import PairwiseComparison, Report
from optexport.bundle.parity_records import ParityRecord
from optexport.config.benchmarks import FormatLimits, GateConfig
from optexport.errors import GateError


def check(
    gate: GateConfig,
    artifacts: Sequence[Artifact],
    report: Report | None,
    parity: ParityRecord,
    without_plain: Mapping[str, str],
) -> None:
    """Checks the measurements against the gates.

    Args:
        gate: The gates.
        artifacts: The exported files.
        report: Measurements of the files and of the plain export; None if no gate needs times.
        parity: Parity record of the files, attached to the error.
        without_plain: Formats without a plain export, with the reason.

    Raises:
        GateError: A gate fails; the message names every failed gate with the measured and the required value.
    """
    failures = [*_size_failures(gate.max_size_mb, artifacts)]
    if report is not None:
        failures += [*_latency_failures(gate.max_latency_ms, artifacts, report)]
        failures += [*_speedup_failures(gate.min_speedup, artifacts, report, without_plain)]
    if failures:
        raise GateError(
            "the exported files miss the gates", location="[gate]", details="\n".join(failures), parity=parity
        )


def check_never_slower(
    report: Report, measure_again: Callable[[PairwiseComparison], PairwiseComparison], parity: ParityRecord
) -> None:
    """Checks that no file is slower than the plain export, with a second look.

    Measures files that look slower again: the interval is at 95 %, so one in forty files of equal speed looks slower.

    Raises:
        GateError: A file is slower both times.
    """
    slower_once = [pair for pair in report.comparisons if _is_over_plain(pair) and pair.comparison.verdict == "slower"]
    slower = [pair for pair in map(measure_again, slower_once) if pair.comparison.verdict == "slower"]
    if slower:
        lowered = ", ".join(pair.artifact.format for pair in slower if pair.artifact.precision is not None)
        hint = f"Remove {lowered} from [precision], or remove [tune]: the plain export is in float32."
        raise GateError(
            "some tuned files are slower than the plain export",
            details="\n".join(map(_speedup_text, slower)),
            hint=hint if lowered else None,
            parity=parity,
        )


def _is_over_plain(pair: PairwiseComparison) -> bool:
    """Returns True if the baseline is the plain export, and not the original model."""
    return pair.baseline.format == pair.artifact.format


def _speedup_text(pair: PairwiseComparison) -> str:
    c = pair.comparison
    speedup = f"has speedup {c.speedup:.3g} ({c.low:.3g} to {c.high:.3g}) over the plain export"
    return f"{pair.artifact.name} {speedup} at {pair.workload.label}"


def _limited_artifacts(limits: FormatLimits | None, artifacts: Sequence[Artifact]) -> Iterator[tuple[Artifact, float]]:
    """Yields the artifacts that have a limit, with the limit."""
    for artifact in artifacts:
        value = None if limits is None else limits.of(artifact.format)
        if value is not None:
            yield artifact, value


def _size_failures(limits: FormatLimits | None, artifacts: Sequence[Artifact]) -> Iterator[str]:
    for artifact, maximum in _limited_artifacts(limits, artifacts):
        if artifact.size > maximum * 1e6:
            yield f"max_size_mb: {artifact.name} has {artifact.size / 1e6:.4g} MB, maximum {maximum:g}"


def _latency_failures(limits: FormatLimits | None, artifacts: Sequence[Artifact], report: Report) -> Iterator[str]:
    for artifact, maximum in _limited_artifacts(limits, artifacts):
        measured = [figures for figures in report.figures if figures.artifact == artifact]
        if not measured:
            yield f"max_latency_ms: {artifact.name} was not measured, because it accepts only the traced shape"
        for figures in measured:
            if figures.p50 * 1e3 > maximum:
                latency = f"takes {figures.p50 * 1e3:.4g} ms (p50)"
                yield f"max_latency_ms: {artifact.name} {latency} at {figures.workload.label}, maximum {maximum:g}"


def _speedup_failures(
    limits: FormatLimits | None, artifacts: Sequence[Artifact], report: Report, without_plain: Mapping[str, str]
) -> Iterator[str]:
    for artifact, minimum in _limited_artifacts(limits, artifacts):
        pairs = [pair for pair in report.comparisons if pair.artifact == artifact and _is_over_plain(pair)]
        if artifact.format in without_plain:
            cause = without_plain[artifact.format]
            yield f"min_speedup: {artifact.name} has no baseline, because the plain export failed: {cause}"
        elif not pairs:
            yield f"min_speedup: {artifact.name} was not compared with the plain export: one has a fixed shape"
        for pair in pairs:
            if pair.comparison.low < minimum:
                yield f"min_speedup: {_speedup_text(pair)}, minimum {minimum:g} for the lower end of the interval"
