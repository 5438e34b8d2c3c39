"""The way of a model through the stages, from its source to a proven bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import fx

from optexport import bundle, inputs, interrupts, places, records, runtimes, sources, tracking
from optexport.bench import gates, report
from optexport.bench.artifact import exported
from optexport.bench.measuring import Report, measure
from optexport.bench.race import Settings
from optexport.bench.workload import Workload, from_signature
from optexport.blame import failure
from optexport.blame.files import blame_files
from optexport.blame.rules import blame_rules
from optexport.config import Config, Format, SourceKind, load_config, source_kind
from optexport.errors import ConfigError, TrackingError, redact
from optexport.formats import exported_program, onnx, torchscript
from optexport.job import Job, resolved, rules_of, unmeasured
from optexport.manifest import ArtifactRecord, Manifest, ParityRecord
from optexport.original import graph_runner, run_reference, trace_original
from optexport.proof import decisions, floor
from optexport.proof.parity import GRAPH, PlaceParity, Proof
from optexport.proof.record import parity_record
from optexport.proof.reference import Reference
from optexport.proof.suspects import Suspects
from optexport.proof.vocabulary import vocabularies
from optexport.signature import Signature
from optexport.sources import Loaded
from optexport.stages import Stages
from optexport.transform import Applied, transform
from optexport.undoing import check_undo

_FILES = {"onnx": "model.onnx", "torchscript": "model.torchscript.pt", "pt2": "model.pt2"}


@dataclass(frozen=True)
class Result:
    """What came of a run that ended well.

    Attributes:
        output: The bundle's folder.
        parity: How near every place is to the original, in the order of the pipeline.
        manifest: What the bundle says of itself.
        run_id: The MLflow run, if there is one.
        run_page: The address of that run in MLflow's own page, after the command that serves it if one is needed.
        tracking_failure: Why the run could not be tracked, if it could not.
        baseline: The folder of the untransformed export, if it was asked for.
        bench: What was measured of the files, if anything.
    """

    output: Path
    parity: tuple[PlaceParity, ...]
    manifest: Manifest
    run_id: str | None = None
    run_page: str | None = None
    tracking_failure: TrackingError | None = None
    baseline: Path | None = None
    bench: Report | None = None

    @property
    def passed(self) -> bool:
        """Whether every place passed; always so, since a run that did not raises `ParityError` instead."""
        return all(place.passed for place in self.parity)

    @property
    def files(self) -> dict[str, Path]:
        """The exported files by format."""
        return {artifact.format: self.output / artifact.path for artifact in self.manifest.artifacts}

    @property
    def transformed_nodes(self) -> dict[str, list[str]]:
        """The nodes that each rule changed."""
        nodes: dict[str, list[str]] = {}
        for transformation in self.manifest.transformations:
            nodes.setdefault(transformation.rule, []).extend(n for c in transformation.changes for n in c.nodes)
        return nodes


def run(
    path: Path,
    *,
    without: Sequence[str] = (),
    baseline: bool = False,
    dump: Path | None = None,
    stages: Stages | None = None,
    keep: bool = True,
) -> Result:
    """Runs a config file.

    Args:
        without: Rules to leave out.
        baseline: Whether to write the untransformed export too, to ``<output>-baseline``.
        dump: A folder to write the graph to, before and after every transformation.
        stages: Is told of every stage.
        keep: Whether the bundle stays and the run is tracked; else it is only proven.

    Raises:
        OptexportError: One of its kinds, with the exit code of what went wrong.
    """
    stages = stages or Stages()
    config, folder = load_config(path, without), path.parent
    rules = rules_of(config, folder, without)
    metrics = decisions.load_metrics(config.parity.decisions, folder)
    config = resolved(config, rules)
    if not keep:
        config = unmeasured(config)
        config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"enabled": False})})
    output = places.output_of(config, folder)
    plain = places.beside(output, "baseline")
    if dump is not None:
        places.check_outside("--dump", dump, places.kept(output), is_file=False)
    for place in ((output, plain) if baseline else (output,)) if keep else ():
        bundle.check_output(place)
    if dump is not None:
        try:
            dump.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"nothing can be written there: {error}", place=f"--dump {dump}") from error
    with interrupts.temporary_folder() as downloads, tracking.tracking(config.tracking, folder) as tracker:
        tracker.params(config.model_dump(mode="json", exclude_none=True))
        tracker.tags({**tracking.git_tags(folder), **records.versions(), "source": config.model.source})
        with stages.stage("load"):
            loaded = _load(config, folder, downloads)
        with stages.stage("inputs"):
            given = inputs.prepare(
                config.inputs, folder, loaded.model, loaded.pretrained, config.parity.seed, loaded.program
            )
        text = redact(path.read_text(encoding="utf-8"))  # a tracking URI may hold a password
        job = Job(
            config, loaded, given.example, given.real, given.dynamic, rules, output, text, dump, given.rows, metrics
        )
        if not keep:
            job = replace(job, output=downloads / "bundle", beside=output)
        if baseline:
            produce(
                replace(job, config=resolved(unmeasured(config), (), plain), rules=(), output=plain, dump=None),
                Stages(lambda name, seconds: stages.announce(f"baseline: {name}", seconds)),
            )
        result = produce(job, stages)
        with stages.stage("track"):
            figures = None if result.bench is None else report.metrics(result.bench)
            tracker.result(result.manifest, stages.seconds, job.output, text, figures)
    return replace(
        result,
        run_id=tracker.run_id,
        run_page=tracker.page,
        tracking_failure=tracker.failure,
        baseline=plain if baseline else None,
    )


def produce(job: Job, stages: Stages) -> Result:
    """Traces, transforms, exports and proves. The bundle appears when all of it is proven, and not before."""
    with (
        bundle.drafting(job.output) as draft,
        torch.random.fork_rng(devices=[]),
        interrupts.temporary_folder() as scratch,
    ):
        with stages.stage("trace"):
            traced, call = trace_original(job)
            signature = traced.signature
            workloads = _workloads(job, signature, scratch)
            nodes_before = records.write_graph(draft / "graph_before.txt", traced.graph_module)
        with stages.stage("reference"):
            ids = vocabularies(traced.graph_module, signature)
            reference = run_reference(job, traced, call, ids)
            proof = _proof(job, reference)
        with stages.stage("transform"):
            transformed = transform(traced.graph_module, job.rules, job.dump)
            graph_module, applied = transformed.graph_module, transformed.applied
            records.write_graph(draft / "graph_after.txt", graph_module)
        with stages.stage("check graph"):
            suspects = Suspects(proof, call, job.loaded.model, signature, ids, job.config.parity)
            if not suspects.check(GRAPH, graph_runner(graph_module, call)).passed:
                find = partial(blame_rules, lambda: trace_original(job), job.rules, proof)
                raise failure.error(proof, job.failure, job.config_text, find, suspects.smallest)
        artifacts = []
        for artifact in _export(graph_module, signature, job, applied, draft, stages):
            artifacts.append(artifact)
            with stages.stage(f"check {artifact.format}"):
                fixed = artifact.fixed_shape is not None
                for place, candidate in runtimes.open_file(
                    draft / artifact.path, artifact.format, signature.output_names
                ):
                    suspects.check(place, candidate, traced_shape_only=fixed)
        if not proof.passed:
            flat = exported_program.flatten(graph_module, signature)
            files: dict[str, Path] = {artifact.format: draft / artifact.path for artifact in artifacts}
            find = partial(blame_files, flat, files, proof)
            raise failure.error(proof, job.failure, job.config_text, find, suspects.smallest)
        with stages.stage("undo"):
            check_undo(graph_module, transformed.undoable, transformed.earlier, job.example)
        found = parity_record(proof)
        bench = _measure(job, workloads, artifacts, draft, scratch, found, stages)
        with stages.stage("bundle"):
            stored = bundle.write_reference(draft / bundle.REFERENCE, reference)
            if job.config_text is not None:
                (draft / "config.toml").write_text(job.config_text, encoding="utf-8")
            manifest = records.manifest(
                job.config, job.loaded, traced, transformed, nodes_before, found, stored, artifacts
            ).model_copy(update={"files": bundle.file_records(draft)})
            bundle.write_manifest(draft, manifest)
        bundle.write_measurements(
            draft, records.measurements(stages.seconds, None if bench is None else report.as_json(bench))
        )
    failure.remove(job.failure)
    return Result(job.output, tuple(proof.places), manifest, bench=bench)


def _export(
    graph_module: fx.GraphModule,
    signature: Signature,
    job: Job,
    applied: Sequence[Applied],
    draft: Path,
    stages: Stages,
) -> Iterator[ArtifactRecord]:
    """Writes the files, and gives the record of each as soon as it is there."""
    with stages.stage("re-export"):
        flat = exported_program.flatten(graph_module, signature)
        program = exported_program.to_program(flat, signature, job.example)
    for name in dict.fromkeys(job.config.export.formats):
        path, fixed_shape = draft / _FILES[name], None
        with stages.stage(f"export {name}"):
            if name == "pt2":
                exported_program.save(program, path)
            elif name == "torchscript":
                fixed_shape = torchscript.save(program, signature, job.example, path)
            else:
                metadata = records.onnx_metadata(job.loaded, applied)
                onnx.save(flat, signature, job.example, path, opset=job.config.export.opset, metadata=metadata)
        yield ArtifactRecord(format=name, path=path.name, fixed_shape=fixed_shape)


def _workloads(job: Job, signature: Signature, folder: Path) -> list[Workload]:
    """What the files will be measured on, so that a size that the model does not take is told early; else nothing."""
    bench = job.config.bench
    if not (bench.enabled or job.config.gate.needs_times):
        return []
    return from_signature(job.example, signature, bench.shapes, folder, "bench.shapes")


def _measure(
    job: Job,
    workloads: Sequence[Workload],
    artifacts: Sequence[ArtifactRecord],
    draft: Path,
    scratch: Path,
    proof: ParityRecord,
    stages: Stages,
) -> Report | None:
    """Measures the files where that is asked for, with the plain export if they are to be faster; checks the gates."""
    bench, gate = job.config.bench, job.config.gate
    if not workloads and gate.max_size_mb is None:
        return None
    inputs = list(job.example)
    files, plain, found = exported(artifacts, inputs, draft, ""), [], None
    if workloads:
        with stages.stage("measure"):
            if gate.min_speedup is not None:
                compared = [name for name in job.config.export.formats if gate.min_speedup.of(name) is not None]
                plain = exported(_export_plain(job, compared, scratch), inputs, scratch, "plain ", proven=False)
            pairs = [(ours, theirs) for ours in files for theirs in plain if ours.format == theirs.format]
            settings = Settings(bench.threads, bench.rounds)
            found = measure([*files, *plain], workloads, pairs, settings)
    gates.check(gate, files, found, proof)
    return found


def _export_plain(job: Job, formats: Sequence[Format], folder: Path) -> list[ArtifactRecord]:
    """Exports the model as it was traced, without any rule, to be measured and thrown away."""
    export = job.config.export.model_copy(update={"formats": list(formats)})
    job = replace(job, config=job.config.model_copy(update={"export": export}), rules=())
    traced, _ = trace_original(job)
    return list(_export(traced.graph_module, traced.signature, job, (), folder, Stages()))


def _load(config: Config, folder: Path, downloads: Path) -> Loaded:
    downloaded = None
    if source_kind(config.model.source, folder) is SourceKind.MLFLOW:
        uri = config.model.source.removeprefix("mlflow:")
        downloaded = tracking.download_model(uri, config.tracking, folder, downloads)
    return sources.load(config.model, folder, downloaded)


def _proof(job: Job, reference: Reference) -> Proof:
    parity = job.config.parity
    bounds = floor.bounds(reference, parity.multiple, parity.atol, parity.rtol)
    proof = Proof(
        reference, bounds, decisions.make_gates(parity.decisions, job.metrics, reference, bounds, parity.multiple)
    )
    decisions.check_usable(proof.places[0].decisions)
    return proof
