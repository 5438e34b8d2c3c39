"""Transforms, checks, exports and undoes the variants of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import fx, nn

from optexport._utils import model_memory, signals
from optexport._utils.progress import Progress
from optexport.bundle.artifacts import write_artifact
from optexport.bundle.manifest import ArtifactRecord, PrecisionRecord
from optexport.bundle.node_error_records import NodeErrorsRecord
from optexport.bundle.outcomes import Outcome
from optexport.cache import exports
from optexport.config.schema import Format
from optexport.diagnosis import failure
from optexport.diagnosis.bisect_artifacts import diagnose_artifacts
from optexport.diagnosis.bisect_rules import diagnose_rules
from optexport.diagnosis.node_errors import measure_node_errors
from optexport.diagnosis.reproduction import Finding
from optexport.errors import ExportError, OptexportError
from optexport.exporters import targets
from optexport.exporters.flat_graph import FlatGraph
from optexport.job import Job, Variant, VariantResult
from optexport.parity.checker import GRAPH, ONNX, ONNX_FLOAT32, ParityChecker
from optexport.parity.record import parity_record
from optexport.parity.reference import graph_runner
from optexport.parity.target_check import TargetChecker
from optexport.pipeline.bundle_writer import RunResults, write_graph
from optexport.pipeline.export_ahead import ExportAhead
from optexport.pipeline.steps import TracedJob, trace_original
from optexport.pipeline.undo_check import check_undo
from optexport.quantization.half import HalfCaster
from optexport.quantization.int8 import Quantizer
from optexport.quantization.sensitivity import LayerChoices, check_passed
from optexport.transformations.apply import Transformed, sharing_copy, transform


def transform_variant(variant: Variant, traced: TracedJob, progress: Progress) -> Transformed:
    """Transforms the traced graph with the rules of a variant.

    The traced graph stays unchanged.

    Raises:
        TransformationError, GateError: As for `optexport.transformations.apply.transform`.
    """
    job = traced.job
    suffix, title = _suffix_and_title(variant, job)
    with progress.step(f"transform{suffix}"):
        transformed = transform(sharing_copy(traced.graph_module), variant.rules, job.dump, title and f"{title}-")
    if model_memory.is_large(job.loaded.model):
        model_memory.collect()
        _ = job.loaded.weights_sha256  # computed first, because it reads all weights
        model_memory.page_out(_find_replaced_parameters(job.loaded.model, transformed.graph_module))
    return transformed


class VariantExporter:
    """Exports variants in their formats, and checks every step.

    Args:
        traced: The traced job.
        checker: Compares targets with the reference.
        draft: The folder for the files.
        progress: Receives every step.
        choices: The layers that stay in float32, as far as tuning searched for them.
    """

    def __init__(
        self,
        traced: TracedJob,
        checker: ParityChecker,
        draft: Path,
        progress: Progress,
        choices: LayerChoices,
        ahead: ExportAhead | None = None,
    ) -> None:
        self._traced, self._job, self._checker = traced, traced.job, checker
        self._draft, self._progress, self._choices, self._ahead = draft, progress, choices, ahead
        self._target_checker = TargetChecker(
            checker,
            traced.call,
            traced.job.loaded.model,
            traced.signature,
            traced.vocabularies,
            traced.job.config.parity,
        )
        self._exports_from_cache: list[str] = []

    def export(self, variant: Variant, transformed: Transformed) -> VariantResult:
        """Checks a transformed graph, exports it, checks the files, and undoes the reversible rules on a copy.

        Raises:
            ParityError: The parity check of the graph or of a file fails.
            OptexportError: Another error of `optexport.run`.
        """
        suffix, title = _suffix_and_title(variant, self._job)
        graph_module, lowered = transformed.graph_module, None
        with self._progress.step(f"check graph{suffix}"):
            self._check_graph(variant, graph_module, f"{GRAPH}{suffix}")
        if variant.precision is not None:
            transformed, lowered = self._lower_graph(variant, transformed, variant.precision, suffix)
        write_graph(self._draft / f"graph_after{title and f'.{title}'}.txt", transformed.graph_module)
        artifacts = self._export_files(variant, transformed)
        if lowered is not None:
            artifacts = [artifact.model_copy(update={"precision": lowered}) for artifact in artifacts]
        with self._progress.step("undo"):
            check_undo(graph_module, transformed.undoable, transformed.earlier, self._job.example)
        return VariantResult(variant, transformed, tuple(artifacts))

    def results(self, variants: Sequence[VariantResult], outcomes: Sequence[Outcome]) -> RunResults:
        """Returns the results of the run, after the export of all variants.

        Args:
            outcomes: The results of tuning.
        """
        hits = [f"export {name}" for name in self._exports_from_cache]
        hits += [f"check {target}" for target in self._target_checker.cache_hits]
        with self._progress.step("node errors"):
            errors = self._measure_node_errors(variants)
        parity = parity_record(self._checker)
        return RunResults(self._traced, self._checker, parity, errors, tuple(variants), tuple(outcomes), tuple(hits))

    def _measure_node_errors(self, variants: Sequence[VariantResult]) -> NodeErrorsRecord:
        targets = {}
        for result in variants:
            suffix, _ = _suffix_and_title(result.variant, self._job)
            name = GRAPH if result.variant.precision is None else f"{GRAPH}-cast"
            targets[f"{name}{suffix}"] = (result.transformed.graph_module, result.transformed.applied)
        return measure_node_errors(self._traced.graph_module, targets, self._checker.reference)

    def _check_graph(self, variant: Variant, graph_module: fx.GraphModule, target: str) -> None:
        runner = partial(graph_runner, graph_module, self._traced.call)
        if not self._target_checker.check(target, runner, content=exports.of_graph(graph_module)).passed:
            job = self._job
            retrace = partial(trace_original, job)
            raise self._parity_error(partial(diagnose_rules, retrace, variant.rules, self._checker, job.loaded.model))

    def _lower_graph(
        self, variant: Variant, transformed: Transformed, precision: str, suffix: str
    ) -> tuple[Transformed, PrecisionRecord]:
        """Casts a graph to the lower precision of a variant, and checks the result."""
        with self._progress.step(f"lower{suffix}"):
            caster = HalfCaster(transformed.graph_module, precision)
            choice = caster.choose_layers(
                ", ".join(variant.formats), self._job, self._traced.call, self._checker, self._choices
            )
            cast, applied = caster.cast(choice.float32_units)
        with self._progress.step(f"check lowered graph{suffix}"):
            runner = partial(graph_runner, cast, self._traced.call)
            parity = self._target_checker.check(f"{GRAPH}-cast{suffix}", runner, precision=precision)
            check_passed(parity, self._checker)
        return replace(transformed, graph_module=cast, applied=(*transformed.applied, applied)), choice.record()

    def _export_files(self, variant: Variant, transformed: Transformed) -> list[ArtifactRecord]:
        """Writes and checks the files of a graph; quantizes an ONNX file after its check."""
        graph = self._job.make_flat_graph(self._traced.signature, transformed.graph_module, transformed.applied)
        precision = self._job.precision_of("onnx") if "onnx" in variant.formats else None
        files: dict[str, Path] = {}
        artifacts: list[ArtifactRecord] = []
        with signals.temporary_folder() as scratch:
            for name in variant.formats:
                is_quantized = name == "onnx" and precision is not None
                with self._progress.step(f"export {name}"):
                    artifact, content = self._export_file(
                        name, graph, transformed.graph_module, scratch if is_quantized else self._draft
                    )
                files[name] = (scratch if is_quantized else self._draft) / artifact.path
                artifacts.append(artifact)
                with self._progress.step(f"check {name}"):
                    self._check_file(files[name], artifact, content, variant.precision, is_quantized=is_quantized)
            if not self._checker.passed:
                raise self._parity_error(partial(self._diagnose_files, graph, files, artifacts))
            if precision is not None:
                record = self._lower_onnx(files["onnx"], precision, graph)
                artifacts = [a.model_copy(update={"precision": record}) if a.format == "onnx" else a for a in artifacts]
        return artifacts

    def _diagnose_files(
        self, graph: FlatGraph, files: Mapping[str, Path], artifacts: Sequence[ArtifactRecord]
    ) -> Finding:
        """Finds the cause of a failed file; its hint names the format passes if nothing else is known."""
        finding = diagnose_artifacts(graph.flat, files, self._checker, graph.device)
        failed = next(artifact for artifact in artifacts if artifact.format == finding.target.partition("-")[0])
        if finding.hint is not None or not failed.passes:
            return finding
        names = ", ".join(failed.passes)
        hint = f"Try export.passes = {{ {failed.format} = [] }}, in case a format pass ({names}) did it."
        return replace(finding, hint=hint)

    def _export_file(
        self, name: Format, graph: FlatGraph, graph_module: fx.GraphModule, folder: Path
    ) -> tuple[ArtifactRecord, str | None]:
        """Writes a file, or copies it from the cache; returns its record and its digest for the cache."""
        export = self._job.config.export
        written = None if self._ahead is None else self._ahead.take(graph_module, name, folder)
        artifact, is_cache_hit = written or exports.export(graph, name, folder, export.passes.get(name, []))
        self._exports_from_cache += [name] * is_cache_hit
        self._check_dynamic(artifact)
        return artifact, exports.of_file(folder / artifact.path, name)

    def _check_dynamic(self, artifact: ArtifactRecord) -> None:
        """Refuses a file for one size if axes are declared as dynamic."""
        dims, config = self._traced.signature.dims, self._job.config.export
        is_declared = self._job.dynamic is not None and self._job.is_dynamic_declared and dims
        if artifact.fixed_shape is not None and is_declared and not config.allow_fixed_shape:
            raise ExportError(
                f"{artifact.fixed_shape}, and a trace would accept only the traced sizes, although"
                f" {' and '.join(dims)} {'is' if len(dims) == 1 else 'are'} declared as dynamic",
                location=f"export.formats: {artifact.format}",
                hint="Replace that operator by others, leave the format out of export.formats, or set"
                " export.allow_fixed_shape = true to get a file for one size.",
            )

    def _check_file(
        self, path: Path, artifact: ArtifactRecord, content: str | None, precision: str | None, *, is_quantized: bool
    ) -> None:
        """Checks a file in each way that its runtime can open it."""
        job, outputs = self._job, self._traced.signature.output_names
        for target, opened in targets.list_openers(path, artifact.format, outputs, job.config.model.device):
            parity = self._target_checker.check(
                target.replace(ONNX, ONNX_FLOAT32, 1) if is_quantized else target,
                opened,
                content=content,
                traced_shape_only=artifact.fixed_shape is not None,
                precision=precision,
            )
            check_passed(parity, self._checker)
            if model_memory.is_large(job.loaded.model):
                model_memory.collect()

    def _lower_onnx(self, path: Path, precision: str, graph: FlatGraph) -> PrecisionRecord:
        """Writes a quantized copy of an ONNX file, and checks it."""
        with self._progress.step("lower onnx"):
            quantizer = Quantizer(path, precision, self._job.weight_bits, self._checker)
            choice = quantizer.choose_layers(self._job, graph.flat, self._choices)
            quantizer.write(choice.float32_units, self._draft / path.name)
        with self._progress.step("check lowered onnx"):
            for target, opened in targets.list_openers(self._draft / path.name, "onnx", graph.signature.output_names):
                parity = self._target_checker.check(target, opened, precision=precision)
                check_passed(parity, self._checker)
        return choice.record()

    def _parity_error(self, find: Callable[[], Finding]) -> OptexportError:
        """Returns the error of a failed check, after a diagnosis."""
        return failure.diagnose_failure(
            self._checker, self._job.failure, self._job.config_text, find, self._target_checker.find_smallest_failing
        )


def _suffix_and_title(variant: Variant, job: Job) -> tuple[str, str]:
    """Returns suffixes for the steps and files of a variant; empty if there is only one."""
    if len(job.variants) == 1:
        return "", ""
    return f" for {', '.join(variant.formats)}", "-".join(variant.formats)


def _find_replaced_parameters(model: nn.Module, graph_module: fx.GraphModule) -> list[torch.Tensor]:
    """Returns the parameters of the original that a transformed graph no longer has."""
    remaining = {id(parameter) for parameter in graph_module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in remaining]


def export_plain(
    job: Job, formats: Sequence[Format], folder: Path
) -> tuple[list[ArtifactRecord], dict[Format, ExportError]]:
    """Exports the traced model without rules or format passes, for benchmarks only.

    Returns:
        The files, and the errors of formats that need a rule to export.
    """
    traced, _ = trace_original(replace(job, rules=()))
    graph = job.make_flat_graph(traced.signature, traced.graph_module, ())
    records, failures = [], {}
    for name in formats:
        try:
            records.append(write_artifact(graph, name, folder, ()))
        except ExportError as error:
            failures[name] = error
    return records, failures
