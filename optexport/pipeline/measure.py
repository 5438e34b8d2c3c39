"""Benchmarks the files of a run against the plain export, and checks the gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optexport._utils.progress import Progress
from optexport.bench import gates
from optexport.bench.artifact import Artifact, list_artifacts
from optexport.bench.measure import PairwiseComparison, Report, measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload, from_signature
from optexport.bundle.manifest import ArtifactRecord
from optexport.bundle.outcomes import LEAST_ROUNDS
from optexport.bundle.parity_records import ParityRecord
from optexport.job import Job
from optexport.pipeline import variant
from optexport.signature.signature import Signature


@dataclass(frozen=True)
class Exports:
    """Files of a run to measure.

    Attributes:
        records: Their records in the manifest.
        folder: Their folder.
        scratch: Folder for the plain export.
        parity: Parity record of the files, attached to errors.
    """

    records: Sequence[ArtifactRecord]
    folder: Path
    scratch: Path
    parity: ParityRecord


def workloads(job: Job, signature: Signature, folder: Path) -> list[Workload]:
    """Returns the workloads of a run; empty if nothing is to be measured.

    Runs before the export, so that wrong sizes are reported early.
    """
    config = job.config
    if not (config.bench.enabled or config.tune is not None or config.gate.needs_times):
        return []
    return from_signature(job.example, signature, config.bench.shapes, folder, "bench.shapes")


def measure_exports(
    job: Job, workloads: Sequence[Workload], exports: Exports, progress: Progress, *, tuned: bool
) -> Report | None:
    """Benchmarks the files if the config asks for it, and checks the gates.

    Args:
        job: The run.
        workloads: Workloads to measure; empty if times are not needed.
        exports: Files to measure.
        progress: Times the stage.
        tuned: True if tuning chose the files; they must then not be slower than the plain export.

    Returns:
        The report; None if nothing was measured.

    Raises:
        GateError: A gate fails, or a tuned file is slower than the plain export.
    """
    gate = job.config.gate
    if not workloads and gate.max_size_mb is None:
        return None
    artifacts = list_artifacts(exports.records, list(job.example), exports.folder, "")
    report: Report | None = None
    without_plain: Mapping[str, str] = {}
    if workloads:
        with progress.step("measure"):
            report, without_plain = _measure(job, workloads, artifacts, exports, tuned=tuned)
    gates.check(gate, artifacts, report, exports.parity, without_plain)
    return report


def _measure(
    job: Job, workloads: Sequence[Workload], artifacts: Sequence[Artifact], exports: Exports, *, tuned: bool
) -> tuple[Report, Mapping[str, str]]:
    """Returns the report, and the formats that have no plain export, with the reason."""
    bench, gate = job.config.bench, job.config.gate
    compared = [
        name
        for name in dict.fromkeys(job.config.export.formats)
        if tuned or (gate.min_speedup is not None and gate.min_speedup.of(name) is not None)
    ]
    settings = Settings(bench.threads, max(LEAST_ROUNDS, bench.rounds) if compared else bench.rounds)
    plain: list[Artifact] = []
    without_plain: dict[str, str] = {}
    if compared:
        records, failures = variant.export_plain(job, compared, exports.scratch)
        without_plain = {name: error.message for name, error in failures.items()}
        plain = list_artifacts(records, list(job.example), exports.scratch, "plain ", proven=False)
    pairs = [(artifact, baseline) for artifact in artifacts for baseline in plain if artifact.format == baseline.format]
    report = measure([*artifacts, *plain], workloads, pairs, settings)
    notes = [f"{name}: not compared, because the plain export failed: {cause}" for name, cause in without_plain.items()]
    report = replace(report, notes=(*report.notes, *notes))

    def measure_again(duel: PairwiseComparison) -> PairwiseComparison:
        pair = (duel.artifact, duel.baseline)
        return measure(pair, [duel.workload], [pair], settings).duels[0]

    if tuned:
        gates.check_never_slower(report, measure_again, exports.parity)
    return report, without_plain
