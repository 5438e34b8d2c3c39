"""Builds the files of candidates, and checks each as the run's own files are checked."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from optexport.bench.artifact import Artifact, list_artifacts, read_onnx
from optexport.bundle.outcomes import PARITY_FAILED
from optexport.config.schema import Format
from optexport.errors import OptexportError, describe_error
from optexport.exporters.graph_writer import GraphWriter
from optexport.job import Job
from optexport.parity.checker import GRAPH, ParityChecker
from optexport.parity.reference import Call, graph_runner
from optexport.runtime import runners
from optexport.tracing.trace import Traced
from optexport.transformations.apply import Applied, sharing_copy, transform
from optexport.tuning.candidate import Candidate, passes_in, rules_in

_Result = TypeVar("_Result")


class CandidateRejected(Exception):  # noqa: N818 - an answer, not an error
    """Raised for a candidate that cannot be shipped, with the reason."""


class CandidateBuilder:
    """Builds and checks the files of candidates.

    Args:
        job: The run.
        traced: The traced model; not changed.
        call: Calls the graph.
        checker: Reference, tolerances and gates that candidates must meet.
        folder: Folder for the files.
    """

    def __init__(self, job: Job, traced: Traced, call: Call, checker: ParityChecker, folder: Path) -> None:
        self.job, self.traced, self.call, self.checker, self.folder = job, traced, call, checker, folder
        self._graphs: dict[tuple[int, ...], tuple[GraphWriter, tuple[Applied, ...]] | CandidateRejected] = {}
        self._files = 0

    def matching_rules(self, candidate: Candidate) -> list[int]:
        """Returns the rules of a candidate that match somewhere, when all of them are applied.

        Raises:
            CandidateRejected: A rule failed, or the graph failed the parity check.
        """
        _, applied = self._graph(candidate)
        return [i for i, rule in zip(rules_in(candidate), applied, strict=True) if rule.report.changes]

    def build(self, file_format: Format, candidate: Candidate, name: str) -> Artifact:
        """Builds and checks a candidate's file.

        Args:
            file_format: Format of the file.
            candidate: Rules and format passes.
            name: Name of the artifact while it is measured.

        Raises:
            CandidateRejected: The file cannot be built, or failed the parity check.
        """
        writer, _ = self._graph(candidate)
        self._files += 1
        folder = self.folder / str(self._files)
        folder.mkdir()

        def write_and_check() -> Artifact:
            record = writer.write(file_format, folder, passes_in(candidate), self.job.config.export.opset)
            (artifact,) = list_artifacts([record], list(self.job.example), folder, "")
            names = writer.signature.output_names
            for target, run in runners.open_file(artifact.path, file_format, names, writer.device):
                self._check(target, run, traced_shape_only=artifact.fixed)
            return replace(artifact, name=name)

        try:
            return _reject_on_error(write_and_check)
        except CandidateRejected:
            shutil.rmtree(folder)
            raise

    def discard(self, artifact: Artifact) -> None:
        """Removes a file, because the disk may not have room for many large models."""
        shutil.rmtree(artifact.path.parent)

    def _graph(self, candidate: Candidate) -> tuple[GraphWriter, tuple[Applied, ...]]:
        rules = tuple(rules_in(candidate))
        if rules not in self._graphs:
            try:
                self._graphs[rules] = _reject_on_error(lambda: self._transform(rules))
            except CandidateRejected as refusal:
                self._graphs[rules] = refusal
        graph = self._graphs[rules]
        if isinstance(graph, CandidateRejected):
            raise graph
        return graph

    def _transform(self, rules: tuple[int, ...]) -> tuple[GraphWriter, tuple[Applied, ...]]:
        job = self.job
        transformed = transform(sharing_copy(self.traced.graph_module), [job.rules[i] for i in rules])
        self._check(GRAPH, graph_runner(transformed.graph_module, self.call))
        writer = GraphWriter(
            transformed.graph_module,
            self.traced.signature,
            job.example,
            job.loaded.weights_sha256,
            transformed.applied,
            job.config.model.device,
        )
        return writer, transformed.applied

    def _check(self, target: str, run: runners.Run, *, traced_shape_only: bool = False) -> None:
        checker = ParityChecker(self.checker.reference, self.checker.tolerances, self.checker.gates)
        parity = checker.check(target, run, traced_shape_only=traced_shape_only)
        failures = [f"{output.output} {output.failure}" for output in parity.outputs if output.failure is not None]
        failures += [gate_result.failure for gate_result in parity.gate_results if gate_result.failure is not None]
        if failures:
            raise CandidateRejected(f"{PARITY_FAILED} for {target}: {failures[0]}")


def digest_of(artifact: Artifact) -> str:
    """Returns a digest of a file, without the metadata of ONNX."""
    if artifact.format != "onnx":
        return hashlib.sha256(artifact.path.read_bytes()).hexdigest()
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
