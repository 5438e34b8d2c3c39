"""Transforms, checks, exports and undoes one variant of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import fx, nn

from optexport._utils import memory, signals
from optexport._utils.progress import Progress
from optexport.bundle.manifest import ArtifactRecord, PrecisionRecord
from optexport.cache import exports
from optexport.config.schema import Format
from optexport.diagnosis import reproduction
from optexport.diagnosis.bisect_artifacts import diagnose_artifacts
from optexport.diagnosis.bisect_rules import diagnose_rules
from optexport.errors import ExportError
from optexport.exporters.writer import Writer
from optexport.job import Job, Variant, VariantResult
from optexport.parity.candidate_check import CandidateChecker
from optexport.parity.checker import GRAPH, ONNX, ONNX_FLOAT32
from optexport.parity.reference import graph_runner
from optexport.pipeline import bundle_writer
from optexport.pipeline.steps import trace_original
from optexport.pipeline.undo_check import check_undo
from optexport.quantization import lower_precision
from optexport.runtime import runners
from optexport.transformations.apply import Transformed, sharing_copy, transform


def apply(branch: Variant, graph_module: fx.GraphModule, job: Job, progress: Progress) -> Transformed:
    """Transforms a traced graph with the rules of a variant.

    Args:
        graph_module: The traced graph; changed in place if there is only one variant.

    Raises:
        TransformationError, GateError: As for `optexport.transformations.apply.transform`.
    """
    formats, title = _names(branch, job)
    with progress.step(f"transform{formats}"):
        given = graph_module if len(job.variants) == 1 else sharing_copy(graph_module)
        transformed = transform(given, branch.rules, job.dump, title and f"{title}-")
    if memory.is_large(job.loaded.model):
        memory.collect()
        _ = job.loaded.weights_sha256  # computed first, because it reads all weights
        memory.page_out(_replaced(job.loaded.model, transformed.graph_module))
    return transformed


def produce(
    branch: Variant,
    transformed: Transformed,
    candidate_checker: CandidateChecker,
    job: Job,
    draft: Path,
    progress: Progress,
) -> VariantResult:
    """Exports a transformed graph in the formats of a variant, and checks every step.

    Args:
        candidate_checker: Checks the graph and the files.

    Raises:
        ParityError: The parity check of the graph or of a file fails.
        OptexportError: Another error of `pipeline.run`.
    """
    formats, title = _names(branch, job)
    proof, graph_module = candidate_checker.proof, transformed.graph_module
    signature, call = candidate_checker.signature, candidate_checker.run
    with progress.step(f"check graph{formats}"):
        target, runner = f"{GRAPH}{formats}", partial(graph_runner, graph_module, call)
        if not candidate_checker.check(target, runner, content=exports.of_graph(graph_module)).passed:
            find = partial(diagnose_rules, lambda: trace_original(job), branch.rules, proof, job.loaded.model)
            raise reproduction.error(proof, job.failure, job.config_text, find, candidate_checker.smallest)
    lowered: PrecisionRecord | None = None
    if branch.precision is not None:
        with progress.step(f"lower{formats}"):
            cast, applied, lowered = lower_precision.cast_graph(transformed.graph_module, branch, job, call, proof)
        with progress.step(f"check graph{formats}"):
            target = f"{GRAPH}-cast{formats}"
            runner = partial(graph_runner, cast, call)
            lower_precision.check_passed(candidate_checker.check(target, runner, precision=branch.precision), proof)
        transformed = replace(transformed, graph_module=cast, applied=(*transformed.applied, applied))
    bundle_writer.write_graph(draft / f"graph_after{title and f'.{title}'}.txt", transformed.graph_module)
    device = job.config.model.device
    writer = Writer(
        transformed.graph_module, signature, job.example, job.loaded.weights_sha256, transformed.applied, device
    )
    artifacts, cache_hits = _write(branch, writer, candidate_checker, job, draft, progress)
    if lowered is not None:
        artifacts = [artifact.model_copy(update={"precision": lowered}) for artifact in artifacts]
    with progress.step("undo"):
        check_undo(graph_module, transformed.undoable, transformed.earlier, job.example)
    return VariantResult(branch, transformed, tuple(artifacts), tuple(cache_hits))


def _names(branch: Variant, job: Job) -> tuple[str, str]:
    """Returns suffixes for the steps and files of a variant; empty if there is only one."""
    if len(job.variants) == 1:
        return "", ""
    return f" for {', '.join(branch.formats)}", "-".join(branch.formats)


def _write(
    branch: Variant, writer: Writer, candidate_checker: CandidateChecker, job: Job, draft: Path, progress: Progress
) -> tuple[list[ArtifactRecord], list[str]]:
    """Writes and checks the files of a graph; quantizes an ONNX file after its check.

    Returns the records of the files, and the formats that are from the cache.
    """
    proof, outputs = candidate_checker.proof, writer.signature.output_names
    precision = job.precision_of("onnx") if "onnx" in branch.formats else None
    files: dict[str, Path] = {}
    artifacts: list[ArtifactRecord] = []
    cache_hits: list[str] = []
    with signals.temporary_folder() as scratch:
        for name in branch.formats:
            later = name == "onnx" and precision is not None
            with progress.step(f"export {name}"):
                folder = scratch if later else draft
                passes = job.config.export.passes.get(name, [])
                artifact, is_kept = exports.export(writer, name, folder, passes, job.config.export.opset)
                content = exports.of_file(folder / artifact.path)
            files[name] = folder / artifact.path
            artifacts.append(artifact)
            cache_hits += [name] * is_kept
            with progress.step(f"check {name}"):
                fixed = artifact.fixed_shape is not None
                for target, opened in runners.ways_to_open(files[name], name, outputs, writer.device):
                    target = target.replace(ONNX, ONNX_FLOAT32, 1) if later else target
                    parity = candidate_checker.check(
                        target, opened, content=content, traced_shape_only=fixed, precision=branch.precision
                    )
                    lower_precision.check_passed(parity, proof)
                    if memory.is_large(job.loaded.model):
                        memory.collect()
        if not proof.passed:
            find = partial(diagnose_artifacts, writer.flat, files, proof, writer.device)
            raise reproduction.error(proof, job.failure, job.config_text, find, candidate_checker.smallest)
        if precision is not None:
            with progress.step("lower onnx"):
                record = lower_precision.quantize_file(files["onnx"], draft, precision, job, proof, writer.flat)
            with progress.step("check onnx"):
                for target, opened in runners.ways_to_open(draft / files["onnx"].name, "onnx", outputs):
                    lower_precision.check_passed(candidate_checker.check(target, opened, precision=precision), proof)
            artifacts = [a.model_copy(update={"precision": record}) if a.format == "onnx" else a for a in artifacts]
    return artifacts, cache_hits


def _replaced(model: nn.Module, graph_module: fx.GraphModule) -> list[torch.Tensor]:
    """Returns the parameters of the original that a transformed graph no longer has."""
    held = {id(parameter) for parameter in graph_module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in held]


def export_plain(
    job: Job, formats: Sequence[Format], folder: Path
) -> tuple[list[ArtifactRecord], dict[Format, ExportError]]:
    """Exports the traced model without rules or format passes, for benchmarks only.

    Returns:
        The files, and the errors of formats that need a rule to export.
    """
    traced, _ = trace_original(replace(job, rules=()))
    writer = Writer(
        traced.graph_module, traced.signature, job.example, job.loaded.weights_sha256, (), job.config.model.device
    )
    written, refused = [], {}
    for name in formats:
        try:
            written.append(writer.write(name, folder, (), job.config.export.opset))
        except ExportError as error:
            refused[name] = error
    return written, refused
