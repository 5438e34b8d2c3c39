"""Measures the files of a run, beside the plain export where they are to be faster, and holds them to the gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optexport._utils.progress import Progress
from optexport.bench import gates
from optexport.bench.artifact import exported
from optexport.bench.measure import PairwiseComparison, Report, measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload, from_signature
from optexport.bundle.manifest import ArtifactRecord, ParityRecord
from optexport.config.benchmarks import LEAST_ROUNDS
from optexport.job import Job
from optexport.pipeline import variant
from optexport.signature.signature import Signature


def workloads(job: Job, signature: Signature, folder: Path) -> list[Workload]:
    """What the files will be measured on, so that a size that the model does not take is told early; else nothing."""
    config = job.config
    if not (config.bench.enabled or config.tune is not None or config.gate.needs_times):
        return []
    return from_signature(job.example, signature, config.bench.shapes, folder, "bench.shapes")


def measure_exports(
    job: Job,
    given: Sequence[Workload],
    artifacts: Sequence[ArtifactRecord],
    draft: Path,
    scratch: Path,
    proof: ParityRecord,
    progress: Progress,
    *,
    tuned: bool,
) -> Report | None:
    """Measures the files, where that is asked for, and checks the gates.

    Args:
        given: What to measure on; nothing where nothing is to be measured.
        draft: The folder of the files.
        scratch: Where to write the plain export.
        proof: That the files compute what the original does, for whoever reads the error.
        tuned: Whether the files were chosen by tuning, and may not be slower than the plain export.

    Raises:
        GateError: They do not keep to a gate, or are slower though they were tuned.
    """
    bench, gate = job.config.bench, job.config.gate
    if not given and gate.max_size_mb is None:
        return None
    inputs = list(job.example)
    files, plain, found = exported(artifacts, inputs, draft, ""), [], None
    without_plain: dict[str, str] = {}
    if given:
        compared = [
            name
            for name in dict.fromkeys(job.config.export.formats)
            if tuned or (gate.min_speedup is not None and gate.min_speedup.of(name) is not None)
        ]
        settings = Settings(bench.threads, max(LEAST_ROUNDS, bench.rounds) if compared else bench.rounds)
        with progress.step("measure"):
            if compared:
                records, refused = variant.export_plain(job, compared, scratch)
                without_plain = {name: error.message for name, error in refused.items()}
                plain = exported(records, inputs, scratch, "plain ", proven=False)
            pairs = [(ours, theirs) for ours in files for theirs in plain if ours.format == theirs.format]
            found = measure([*files, *plain], given, pairs, settings)
            lacking = [
                f"{name}: no plain export to compare it with could be made: {cause}"
                for name, cause in without_plain.items()
            ]
            found = replace(found, notes=(*found.notes, *lacking))

            def again(duel: PairwiseComparison) -> PairwiseComparison:
                pair = (duel.artifact, duel.baseline)
                return measure(pair, [duel.workload], [pair], settings).duels[0]

            if tuned:
                gates.check_never_slower(found, again, proof)
    gates.check(gate, files, found, proof, without_plain)
    return found
