"""The gates of ``[gate]``: whether exported files are as small and as fast as is demanded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from optexport.bench.artifact import Artifact
from optexport.bench.measure import PairwiseComparison, Report
from optexport.bundle.manifest import ParityRecord
from optexport.config.benchmarks import BarConfig, GateConfig
from optexport.errors import GateError


def check(
    gate: GateConfig,
    artifacts: Sequence[Artifact],
    report: Report | None,
    proof: ParityRecord,
    without_plain: Mapping[str, str],
) -> None:
    """Holds what was measured against what is demanded.

    Args:
        artifacts: The exported files.
        report: What was measured of them, and of the plain export; None where times are not demanded.
        proof: That they compute what the original does, for whoever reads the error.
        without_plain: Why there is no plain export to compare with, for each format of which there is none.

    Raises:
        GateError: Something does not keep to it; the message names each gate, what was measured, what was demanded.
    """
    failures = [*_sizes(gate.max_size_mb, artifacts)]
    if report is not None:
        failures += [*_latencies(gate.max_latency_ms, artifacts, report)]
        failures += [*_speedups(gate.min_speedup, artifacts, report, without_plain)]
    if failures:
        told = "".join(f"\n  {failure}" for failure in failures)
        raise GateError(f"the exported files are not what [gate] demands{told}", proof=proof)


def check_never_slower(
    report: Report, measure_again: Callable[[PairwiseComparison], PairwiseComparison], proof: ParityRecord
) -> None:
    """Checks that no file is slower than the plain export; what seems so is measured once more.

    Of files that are equally fast one in forty seems slower at a first look, its interval being of 95 %.

    Raises:
        GateError: One is.
    """
    seen = [duel for duel in report.duels if duel.comparison.verdict == "slower"]
    slower = [again for again in map(measure_again, seen) if again.comparison.verdict == "slower"]
    if slower:
        told = "".join(f"\n  {_told(duel)}" for duel in slower)
        lowered = ", ".join(duel.artifact.format for duel in slower if duel.artifact.precision is not None)
        hint = f"Tuning chose among files in float32: leave {lowered} out of [precision], or [tune] out."
        raise GateError(
            f"what tuning chose is slower than the plain export{told}", hint=hint if lowered else None, proof=proof
        )


def _told(duel: PairwiseComparison) -> str:
    c = duel.comparison
    found = f"is {c.speedup:.3g} ({c.low:.3g} to {c.high:.3g}) times as fast as the plain export"
    return f"{duel.artifact.name} {found} at {duel.workload.label}"


def _bars(bar: BarConfig | None, artifacts: Sequence[Artifact]) -> Iterator[tuple[Artifact, float]]:
    for artifact in artifacts:
        demanded = None if bar is None else bar.of(artifact.format)
        if demanded is not None:
            yield artifact, demanded


def _sizes(bar: BarConfig | None, artifacts: Sequence[Artifact]) -> Iterator[str]:
    for artifact, most in _bars(bar, artifacts):
        if artifact.size > most * 1e6:
            yield f"max_size_mb: {artifact.name} takes {artifact.size / 1e6:.4g}, {most:g} at most demanded"


def _latencies(bar: BarConfig | None, artifacts: Sequence[Artifact], report: Report) -> Iterator[str]:
    for artifact, most in _bars(bar, artifacts):
        measured = [figures for figures in report.figures if figures.artifact == artifact]
        if not measured:
            yield f"max_latency_ms: {artifact.name} was not measured: it takes the traced shape only"
        for figures in measured:
            if figures.p50 * 1e3 > most:
                took = f"takes {figures.p50 * 1e3:.4g} (p50)"
                yield f"max_latency_ms: {artifact.name} {took} at {figures.workload.label}, {most:g} at most demanded"


def _speedups(
    bar: BarConfig | None, artifacts: Sequence[Artifact], report: Report, without_plain: Mapping[str, str]
) -> Iterator[str]:
    for artifact, least in _bars(bar, artifacts):
        duels = [duel for duel in report.duels if duel.artifact == artifact]
        if artifact.format in without_plain:
            cause = without_plain[artifact.format]
            yield f"min_speedup: {artifact.name} cannot be compared, since the plain export cannot be made: {cause}"
        elif not duels:
            yield f"min_speedup: {artifact.name} was not measured against the plain export: one has a fixed shape"
        for duel in duels:
            if duel.comparison.low < least:
                yield f"min_speedup: {_told(duel)}, {least:g} demanded of the lower end"
