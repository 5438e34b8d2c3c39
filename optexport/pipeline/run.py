"""Runs the export pipeline, from model source to verified bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from optexport import tracking
from optexport._utils import atomic_dir, signals, torch_settings
from optexport._utils.packages import versions
from optexport._utils.progress import Progress
from optexport.bench import report
from optexport.bundle import contents, digests, layout
from optexport.bundle.git import checkout
from optexport.bundle.measurements import Origin
from optexport.bundle.outcomes import Outcome
from optexport.config.benchmarks import TuneConfig
from optexport.config.checks import check_extras
from optexport.config.load import load_config
from optexport.config.schema import Config
from optexport.config.source import SourceKind, source_kind
from optexport.config.text import without_secrets
from optexport.diagnosis import reproduction
from optexport.errors import ConfigError
from optexport.inference.describe import describe
from optexport.inputs import preparation
from optexport.job import Job, resolved, rules_of, unmeasured
from optexport.loading import loader
from optexport.loading.loader import Loaded
from optexport.loading.processing import built_in
from optexport.parity import gates, noise_floor
from optexport.parity.candidate_check import CandidateChecker
from optexport.parity.checker import ParityChecker
from optexport.parity.record import parity_record
from optexport.parity.reference import Reference
from optexport.parity.reference_file import write_reference
from optexport.parity.vocabulary import vocabularies
from optexport.pipeline import bundle_writer, lockfile, measure, triton, variant
from optexport.pipeline.steps import run_reference, sizes_apart, trace_original
from optexport.report import tuning
from optexport.report.html import page
from optexport.result import Result
from optexport.runtime import devices
from optexport.signature.arguments import arguments_of, as_constants
from optexport.signature.signature import Signature
from optexport.tracking import run_params
from optexport.transformations.apply import NamedRule
from optexport.tuning import tuner
from optexport.tuning.candidate_builder import CandidateBuilder


@torch_settings.put_back()
def run(  # noqa: PLR0913 - options of the public API
    path: str | Path,
    *,
    without: Sequence[str] = (),
    tune: bool = False,
    baseline: bool = False,
    dump: str | Path | None = None,
    locked: bool = False,
    progress: Progress | None = None,
    keep: bool = True,
) -> Result:
    """Runs a config file.

    Args:
        without: Names of rules to omit.
        tune: Whether to tune even if the config does not ask for it.
        baseline: Whether to write the untransformed export too, to ``<output>-baseline``.
        dump: A folder for the graph before and after every transformation.
        locked: Whether to reject packages, models or files that differ from the config's lock.
        progress: Receives every step.
        keep: Whether to write the bundle and track the run; otherwise the run only checks parity.

    Raises:
        OptexportError: The run fails; the subclass has the exit code.
    """
    progress = progress or Progress()
    path, dump = layout.as_path(path, "path"), None if dump is None else layout.as_path(dump, "dump")
    config, folder = load_config(path, without), path.parent
    # Read now, because the file may change during the run. A tracking URI may contain a password.
    text = without_secrets(path)
    if config.generation is not None:
        raise ConfigError(
            "it exports the parts of a generative model, of which there is no single result",
            location=f"{path}: generation",
            hint="Call optexport.run_generation(path), or: optexport run",
        )
    check_extras(config, path)
    devices.check(config.model.device, config.export.formats, f"{path}: model.device")
    lock = lockfile.read(path) if locked else None
    if lock is not None:
        lockfile.check_surroundings(lock, config, path, versions())
        config = lockfile.pinned(config, lock, folder)
    rules = rules_of(config, folder, without)
    config = resolved(config, rules)
    if tune and config.tune is None:
        config = config.model_copy(update={"tune": TuneConfig()})
    if not keep:
        config = unmeasured(config)
        config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"enabled": False})})
    output = config.output_path(folder)
    plain = layout.sibling(output, "baseline")
    if dump is not None:
        layout.check_outside("--dump", dump, layout.output_folders(output), is_file=False)
    for target in ((output, plain) if baseline else (output,)) if keep else ():
        contents.check_output(target)
    if dump is not None:
        try:
            dump.mkdir(parents=True, exist_ok=True)
            dump = dump.resolve()  # a model's code may change the working directory
        except OSError as error:
            raise ConfigError(f"nothing can be written there: {error}", location=f"--dump {dump}") from error
    settings, origin = bundle_writer.portable(config), Origin(git=checkout(folder))
    tags = run_params.tags(settings["model"]["source"], versions(), origin)
    with (
        signals.temporary_folder() as downloads,
        contextlib.ExitStack() as until_sent,
        tracking.tracking(config.tracking, path, output, settings, tags) as tracker,
    ):
        job = prepare(config, folder, rules, output, downloads, progress)
        if lock is not None:
            lockfile.check_model(lock, job, path)
        job = replace(job, config_text=text, dump=dump, origin=origin)
        if not keep:
            job = replace(job, output=downloads / "bundle", beside=output)
        if baseline:
            produce(
                replace(job, config=resolved(unmeasured(config), (), plain), rules=(), output=plain, dump=None),
                Progress(lambda name, seconds: progress.announce(f"baseline: {name}", seconds)),
            )
        held = None if lock is None else digests.sha256(lockfile.lock_path(path))
        origin = origin.model_copy(update={"lock_sha256": held, "mlflow_run": tracker.run_id})
        result = produce(replace(job, origin=origin), progress, until_sent)
        with progress.step("track"):
            tracker.send()
    return replace(
        result,
        run_id=tracker.run_id,
        run_page=tracker.page,
        tracking_failure=tracker.failure,
        registered=tracker.registered,
        baseline=plain if baseline else None,
    )


def prepare(
    config: Config,
    folder: Path,
    rules: tuple[NamedRule, ...],
    output: Path,
    downloads: Path,
    progress: Progress,
) -> Job:
    """Loads the model, its inputs, and custom metrics of a config.

    Args:
        folder: The folder that paths in the config are relative to.
        downloads: The folder for downloaded models.
    """
    metrics = gates.load_metrics(config.parity.metrics, folder)
    with progress.step("load"):
        loaded = load_model(config, folder, downloads)
    with progress.step("inputs"):
        given = preparation.prepare(
            config.inputs, folder, loaded.model, loaded.pretrained, config.parity.seed, loaded.program
        )
        if loaded.program is None:
            constants = as_constants(config.inputs.constants)
            arguments = arguments_of(loaded.model, list(given.example), constants)
            loaded = loaded.called_with(given.example, arguments)
    return Job(
        config, loaded, given.example, given.real, given.dynamic, rules, output, rows=given.rows, metrics=metrics
    )


def produce(job: Job, progress: Progress, held: contextlib.ExitStack | None = None) -> Result:
    """Traces, transforms, exports and checks a model; writes the bundle if all checks pass.

    Args:
        held: Takes over the lock of the bundle. No other run replaces the bundle until the stack is closed.
    """
    with (
        atomic_dir.drafting(job.output, layout.check_replaceable, held) as draft,
        torch.random.fork_rng(devices=[]),
        signals.temporary_folder() as scratch,
    ):
        with progress.step("trace"):
            traced, call = trace_original(job)
            job = job.holding(traced.held)
            signature = traced.signature
            if job.config.export.layout is not None:
                triton.check(signature, job.config.export.formats)
            workloads = measure.workloads(job, signature, scratch)
            nodes_before = bundle_writer.write_graph(draft / "graph_before.txt", traced.graph_module)
        with progress.step("reference"):
            ids = vocabularies(traced.graph_module, signature)
            proof = make_checker(job, run_reference(job, traced, call, ids), signature)
        tuned: tuple[Outcome, ...] = ()
        if job.config.tune is not None:
            builder = CandidateBuilder(job, traced, call, proof, scratch)
            job, tuned = tuner.tune(builder, workloads, job.config.tune.seconds, progress)
        graphs = [variant.apply(each, traced.graph_module, job, progress) for each in job.variants]
        with progress.step("other sizes"):
            if suspect_sizes := sizes_apart(job, traced, graphs, call):
                traced, call = trace_original(job)
                proof = make_checker(job, run_reference(job, traced, call, ids, suspect_sizes), signature)
        candidate_checker = CandidateChecker(proof, call, job.loaded.model, signature, ids, job.config.parity)
        made = [
            variant.produce(each, graph, candidate_checker, job, draft, progress)
            for each, graph in zip(job.variants, graphs, strict=True)
        ]
        artifacts = [artifact for each in made for artifact in each.artifacts]
        cache_hits = [f"export {name}" for each in made for name in each.cache_hits] + [
            f"check {p}" for p in candidate_checker.cache_hits
        ]
        found = parity_record(proof)
        files = measure.Exports(artifacts, draft, scratch, found)
        bench = measure.measure_exports(job, workloads, files, progress, tuned=bool(tuned))
        with progress.step("bundle"):
            stored = write_reference(draft / layout.REFERENCE, proof.reference)
            if job.config_text is not None:
                (draft / "config.toml").write_text(job.config_text, encoding="utf-8")
            if job.config.export.layout is not None:
                artifacts = triton.lay_out(draft, job.config.export.output, artifacts, signature, proof.reference)
            application = describe(job.config.model.task, job.loaded, traced.signature, draft)
            manifest = bundle_writer.manifest(
                job.config, job.loaded, traced, made, nodes_before, found, stored
            ).model_copy(
                update={"application": application, "artifacts": artifacts, "files": digests.file_records(draft)}
            )
            contents.write_manifest(draft, manifest)
        measured: dict[str, Any] = {"device": devices.described(job.config.model.device)}
        measured |= {} if bench is None else {"bench": report.as_json(bench)}
        measured |= {"tune": tuning.as_json(tuned)} if tuned else {}
        measured |= {"cache_hits": cache_hits} if cache_hits else {}
        measured |= {"origin": job.origin.model_dump(exclude_none=True)}
        contents.write_measurements(draft, bundle_writer.measurements(progress.seconds, measured))
        with progress.step("report"):
            page.write(draft)
    reproduction.remove(job.failure)
    return Result(job.output, tuple(proof.targets), manifest, bench=bench, tuned=tuned, cache_hits=tuple(cache_hits))


def load_model(config: Config, folder: Path, downloads: Path) -> Loaded:
    """Loads the model of a config, and adds the configured processing.

    Args:
        folder: The folder that paths in the config are relative to.
        downloads: The folder for a model that MLflow stores.
    """
    downloaded = None
    if source_kind(config.model.source, folder) is SourceKind.MLFLOW:
        uri = config.model.source.removeprefix("mlflow:")
        downloaded = tracking.download_model(uri, config.tracking, folder, downloads)
    return built_in(loader.load(config.model, folder, downloaded), config.processing)


def make_checker(job: Job, reference: Reference, signature: Signature) -> ParityChecker:
    """Returns the checker of a job: the reference, a tolerance for each output, and the gates."""
    parity = job.config.parity
    always_empty = [spec.name for spec in signature.outputs if 0 in spec.shape]
    bounds = noise_floor.bounds(reference, parity.noise_multiple, parity.atol, parity.rtol, always_empty=always_empty)
    proof = ParityChecker(
        reference, bounds, gates.make_gates(parity.metrics, job.metrics, reference, bounds, parity.noise_multiple)
    )
    gates.check_usable(proof.targets[0].decisions)
    return proof
