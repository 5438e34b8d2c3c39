"""Benchmarks the files of a run against the plain export, and checks the gates on size and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from optexport._utils import model_memory
from optexport._utils.markup import size_in_words
from optexport._utils.progress import Progress
from optexport.bench import gates
from optexport.bench.artifact import Artifact, list_artifacts
from optexport.bench.measure import measure
from optexport.bench.report import PairwiseComparison, Report
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload, from_signature, other_sizes
from optexport.bundle.outcomes import LEAST_ROUNDS, PYTORCH
from optexport.config.run_steps import is_measured
from optexport.config.schema import Format
from optexport.errors import describe_error
from optexport.job import Job
from optexport.pipeline import variant
from optexport.pipeline.bundle_writer import RunResults
from optexport.pipeline.gain import read_eager, timing_settings
from optexport.pipeline.steps import TracedJob


@dataclass(frozen=True)
class _PlainExport:
    """The export without rules and format passes, as the baseline of benchmarks.

    Attributes:
        artifacts: The files.
        failures: The formats that cannot be exported without a rule, with the reason.
    """

    artifacts: Sequence[Artifact] = ()
    failures: Mapping[str, str] = field(default_factory=dict)


def list_workloads(traced: TracedJob, folder: Path) -> list[Workload]:
    """Returns the workloads of a run, with the most important one first; empty if nothing is to be measured.

    Runs before the export, so that wrong sizes are reported early. Without ``bench.shapes``, they are the traced sizes,
    and smaller and larger ones for tuning.

    Args:
        folder: The folder for the inputs.
    """
    config, signature, example = traced.job.config, traced.signature, traced.job.example
    shapes: Sequence[Mapping[str, int]] = config.bench.shapes
    if config.tune is not None:
        shapes = shapes or [{}, *other_sizes(signature.sizes(example), signature.dims)]
    elif not is_measured(config):
        return []
    return from_signature(example, signature, shapes, folder, "bench.shapes")


def measure_files(
    results: RunResults, workloads: Sequence[Workload], draft: Path, scratch: Path, progress: Progress
) -> RunResults:
    """Benchmarks the files if the config asks for it, and checks the gates.

    Files that tuning chose must not be slower than the plain export. Without benchmarks, the last rung of the search
    has shown that.

    Args:
        workloads: The workloads of the run.
        draft: The folder of the files.
        scratch: The folder for the plain export.

    Returns:
        The results with the benchmarks, if any.

    Raises:
        GateError: A gate fails, or a tuned file is slower than the plain export.
    """
    job = results.traced.job
    needs_times = is_measured(job.config)
    if not needs_times and job.config.gate.max_size_mb is None:
        return results
    names = list(job.example), results.traced.signature.output_names
    artifacts = list_artifacts(results.artifacts, names, draft, "")
    report: Report | None = None
    plain = _PlainExport()
    if needs_times:
        workloads = workloads if job.config.bench.shapes else workloads[:1]
        with progress.step("measure"):
            plain = _export_plain(job, _compared_formats(job, tuned=bool(results.outcomes)), names, scratch)
            report = _measure(results, workloads, artifacts, plain)
    gates.check(job.config.gate, artifacts, report, results.parity, plain.failures)
    return replace(results, bench=report)


def _compared_formats(job: Job, *, tuned: bool) -> list[Format]:
    """Returns the formats to compare with the plain export."""
    min_speedup = job.config.gate.min_speedup
    return [
        name
        for name in dict.fromkeys(job.config.export.formats)
        if tuned or (min_speedup is not None and min_speedup.of(name) is not None)
    ]


def _export_plain(
    job: Job, formats: Sequence[Format], names: tuple[Sequence[str], Sequence[str]], folder: Path
) -> _PlainExport:
    if not formats:
        return _PlainExport()
    records, failures = variant.export_plain(job, formats, folder)
    return _PlainExport(
        list_artifacts(records, names, folder, "plain ", proven=False),
        {name: error.message for name, error in failures.items()},
    )


def _list_original(job: Job, workloads: Sequence[Workload]) -> tuple[list[Artifact], list[str]]:
    """Returns the original model in eager PyTorch as an artifact, or a note why it is not measured.

    On a GPU its inputs would be copied. All files are in memory with it, which is too much for large models.
    """
    model = job.loaded.model
    if job.config.model.device != "cpu":
        return [], []
    if model_memory.is_large(model):
        weights = size_in_words(model_memory.weight_bytes(model))
        return [], [f"{PYTORCH}: not measured, because the model has {weights} of weights"]
    read = partial(read_eager, model)
    try:
        for workload in workloads:
            read(workload.file)()
    except Exception as error:  # the model's code may raise anything at sizes that it was not traced at
        return [], [f"{PYTORCH}: not measured, because the model fails: {describe_error(error)}"]
    return [Artifact(PYTORCH, Path(), PYTORCH, model_memory.weight_bytes(model), prepare=read)], []


def _measure(
    results: RunResults, workloads: Sequence[Workload], artifacts: Sequence[Artifact], plain: _PlainExport
) -> Report:
    """Returns the benchmarks of the files and of the plain export."""
    bench, tuned = results.traced.job.config.bench, bool(results.outcomes)
    is_compared = bool(_compared_formats(results.traced.job, tuned=tuned))
    settings = Settings(bench.threads, max(LEAST_ROUNDS, bench.rounds) if is_compared else bench.rounds)
    pairs = [(own, baseline) for own in artifacts for baseline in plain.artifacts if own.format == baseline.format]
    with timing_settings(results.traced.job.loaded.model, bench.threads):
        original, eager_notes = _list_original(results.traced.job, workloads)
        pairs += [(own, eager) for own in artifacts for eager in original]
        report = measure([*original, *artifacts, *plain.artifacts], workloads, pairs, settings)
    notes = [
        f"{name}: not compared, because the plain export failed: {cause}" for name, cause in plain.failures.items()
    ]
    report = replace(report, notes=(*report.notes, *eager_notes, *notes))

    def measure_again(slower: PairwiseComparison) -> PairwiseComparison:
        pair = (slower.artifact, slower.baseline)
        return measure(pair, [slower.workload], [pair], settings).comparisons[0]

    if tuned:
        gates.check_never_slower(report, measure_again, results.parity)
    return report
