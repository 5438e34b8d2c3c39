"""Builds the files of candidates, and checks each as the run's own files are checked."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from torch import fx

from optexport.bench.artifact import Artifact, list_artifacts
from optexport.bundle.artifacts import write_artifact
from optexport.bundle.manifest import ArtifactRecord
from optexport.bundle.outcomes import PARITY_FAILED
from optexport.cache import exports
from optexport.config.schema import Format
from optexport.errors import OptexportError, describe_error
from optexport.exporters import targets
from optexport.exporters.flat_graph import FlatGraph
from optexport.exporters.format import Run
from optexport.exporters.onnx.format import read_onnx
from optexport.exporters.registry import get_format
from optexport.job import Job
from optexport.parity.checker import GRAPH, ParityChecker
from optexport.parity.reference import Call, graph_runner
from optexport.tracing.trace import Traced
from optexport.transformations.apply import Applied, sharing_copy, transform
from optexport.tuning.candidate import Candidate, passes_in, rules_in

_Result = TypeVar("_Result")


class CandidateRejected(Exception):  # noqa: N818 - an answer, not an error
    """Raised for a candidate that cannot be shipped, with the reason."""


class Lowering(Protocol):
    """Lowers the precision of candidates.

    The pipeline passes it in, because tuning does not import `optexport.quantization`.
    """

    def layer_search_seconds(self, precision: str) -> float:
        """Returns the seconds of the search for the layers that stay in float32, 0 before the first candidate."""

    def cast_graph(self, graph_module: fx.GraphModule, precision: str) -> tuple[fx.GraphModule, Applied]:
        """Returns a copy of a graph in half precision, and the applied rule."""

    def quantize_file(self, source: Path, target: Path, precision: str, graph_module: fx.GraphModule) -> None:
        """Writes a quantized ONNX file, from a file in float32 and its graph."""


@dataclass(frozen=True)
class _Graph:
    graph_module: fx.GraphModule
    applied: tuple[Applied, ...]
    flat_graph: FlatGraph


@dataclass(frozen=True)
class _Export:
    """An exported file in float32 or half precision, before it is quantized."""

    flat_graph: FlatGraph
    record: ArtifactRecord
    folder: Path
    passes: tuple[str, ...]


class CandidateBuilder:
    """Builds and checks the files of candidates.

    Args:
        job: The run.
        traced: The traced model; not changed.
        call: Calls the graph.
        checker: Reference, tolerances and gates that candidates must meet.
        folder: Folder for the files.
        lowering: Lowers graphs and files of formats with a lower precision.
    """

    def __init__(
        self, job: Job, traced: Traced, call: Call, checker: ParityChecker, folder: Path, lowering: Lowering
    ) -> None:
        self.job, self.traced, self.call, self.checker, self.folder = job, traced, call, checker, folder
        self.lowering = lowering
        self._graphs: dict[tuple[tuple[int, ...], str | None], _Graph | CandidateRejected] = {}
        self._exports: dict[Path, _Export] = {}
        self._write_seconds: dict[Format, float] = {}
        self._files = 0

    def layer_search_seconds(self, file_format: Format) -> float:
        """Returns the seconds of the search for layers that stay in float32, which only the first build contains."""
        precision = self.job.precision_of(file_format)
        return 0.0 if precision is None else self.lowering.layer_search_seconds(precision)

    def saved_seconds(self, file_format: Format) -> float:
        """Returns the seconds that `store` saves the run: those of writing the latest file, or 0 without a cache."""
        latest = [export for export in self._exports.values() if export.record.format == file_format]
        is_stored = bool(latest) and exports.can_store(latest[-1].flat_graph, file_format)
        return self._write_seconds[file_format] if is_stored else 0.0

    def matching_rules(self, candidate: Candidate) -> list[int]:
        """Returns the rules of a candidate that match somewhere, when all of them are applied.

        Raises:
            CandidateRejected: A rule failed, or the graph failed the parity check.
        """
        applied = self._graph(candidate).applied
        return [i for i, rule in zip(rules_in(candidate), applied, strict=True) if rule.report.changes]

    def build(self, file_format: Format, candidate: Candidate, name: str) -> Artifact:
        """Builds and checks a candidate's file, in the precision of its format.

        The checks are those of the run: a lowered file must pass the gates, and its graph or file in float32 the
        tolerance.

        Args:
            file_format: Format of the file.
            candidate: Rules and format passes.
            name: Name of the artifact while it is measured.

        Raises:
            CandidateRejected: The file cannot be built, or failed the parity check.
        """
        precision = self.job.precision_of(file_format)
        is_quantized = file_format == "onnx" and precision is not None
        flat_graph = self._graph(candidate, None if is_quantized else precision).flat_graph
        self._files += 1
        folder = self.folder / str(self._files)
        folder.mkdir()

        def write_and_check() -> Artifact:
            source = folder / "float32" if is_quantized else folder
            source.mkdir(exist_ok=True)
            start = time.monotonic()
            record = write_artifact(flat_graph, file_format, source, passes_in(candidate))
            self._write_seconds[file_format] = time.monotonic() - start
            self._check_file(source, record, flat_graph, None if is_quantized else precision)
            if precision is not None and is_quantized:
                self.lowering.quantize_file(source / record.path, folder / record.path, precision, flat_graph.flat)
                if not exports.can_store(flat_graph, file_format):
                    shutil.rmtree(source)
                self._check_file(folder, record, flat_graph, precision)
            names = list(self.job.example), flat_graph.signature.output_names
            (artifact,) = list_artifacts([record], names, folder, "")
            self._exports[artifact.path] = _Export(flat_graph, record, source, tuple(passes_in(candidate)))
            return replace(artifact, name=name, precision=precision)

        try:
            return _reject_on_error(write_and_check)
        except CandidateRejected:
            shutil.rmtree(folder)
            raise

    def store(self, artifact: Artifact) -> None:
        """Stores the export of a chosen file in the cache, so that the run need not repeat it."""
        export = self._exports[artifact.path]
        exports.store_file(export.flat_graph, export.record, export.folder, export.passes)

    def discard(self, artifact: Artifact) -> None:
        """Removes a file, because the disk may not have room for many large models."""
        del self._exports[artifact.path]
        shutil.rmtree(artifact.path.parent)

    def _graph(self, candidate: Candidate, precision: str | None = None) -> _Graph:
        """Returns the checked graph of a candidate, cast to half precision if there is one."""
        key = tuple(rules_in(candidate)), precision
        if key not in self._graphs:
            try:
                self._graphs[key] = _reject_on_error(lambda: self._make_graph(candidate, precision))
            except CandidateRejected as refusal:
                self._graphs[key] = refusal
        graph = self._graphs[key]
        if isinstance(graph, CandidateRejected):
            raise graph
        return graph

    def _make_graph(self, candidate: Candidate, precision: str | None) -> _Graph:
        job = self.job
        if precision is None:
            rules = [job.rules[i] for i in rules_in(candidate)]
            transformed = transform(sharing_copy(self.traced.graph_module), rules)
            graph_module, applied = transformed.graph_module, transformed.applied
        else:
            before = self._graph(candidate)
            graph_module, cast = self.lowering.cast_graph(before.graph_module, precision)
            applied = (*before.applied, cast)
        target = GRAPH if precision is None else f"lowered {GRAPH}"
        self._check(target, graph_runner(graph_module, self.call), precision)
        flat_graph = job.make_flat_graph(self.traced.signature, graph_module, applied)
        return _Graph(graph_module, applied, flat_graph)

    def _check_file(self, folder: Path, record: ArtifactRecord, flat_graph: FlatGraph, precision: str | None) -> None:
        names = flat_graph.signature.output_names
        for target, run in targets.open_file(folder / record.path, record.format, names, flat_graph.device):
            self._check(target, run, precision, traced_shape_only=record.fixed_shape is not None)

    def _check(self, target: str, run: Run, precision: str | None, *, traced_shape_only: bool = False) -> None:
        checker = ParityChecker(self.checker.reference, self.checker.tolerances, self.checker.gates)
        parity = checker.check(target, run, traced_shape_only=traced_shape_only, precision=precision)
        failures = [f"{output.output} {output.failure}" for output in parity.outputs if output.failure is not None]
        failures += [gate_result.failure for gate_result in parity.gate_results if gate_result.failure is not None]
        if failures:
            raise CandidateRejected(f"{PARITY_FAILED} for {target}: {failures[0]}")


def digest_of(artifact: Artifact) -> str:
    """Returns a digest of a file, without the metadata of ONNX."""
    if artifact.format != "onnx":
        files = get_format(artifact.format).existing_files(artifact.path)
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    model = read_onnx(artifact.path)
    model.ClearField("metadata_props")
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _reject_on_error(function: Callable[[], _Result]) -> _Result:
    """Calls a function, and raises every exception as `CandidateRejected`."""
    try:
        return function()
    except CandidateRejected:
        raise
    except OptexportError as error:
        raise CandidateRejected(f"{error.location}: {error.message}" if error.location else error.message) from error
    except Exception as error:  # a format pass may raise anything, and a candidate is only a trial
        raise CandidateRejected(f"raised {describe_error(error)}") from error
