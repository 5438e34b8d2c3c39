"""Makes files by recipes, and proves each as the run's own files are proven."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from optexport.bench.artifact import Artifact, exported, read_onnx
from optexport.config.schema import Format
from optexport.errors import OptexportError, first_line
from optexport.exporters.writer import Writer
from optexport.job import Job
from optexport.parity.checker import GRAPH, ParityChecker
from optexport.parity.reference import Call, graph_runner
from optexport.runtime import runners
from optexport.tracing.trace import Traced
from optexport.transformations.apply import Applied, sharing_copy, transform
from optexport.tuning.candidate import Recipe, passes_in, rules_in
from optexport.tuning.outcome import NOT_THE_SAME

_Made = TypeVar("_Made")


class CandidateRejected(Exception):  # noqa: N818 - no error, but an answer
    """A recipe gives no file that could be shipped; says why."""


class CandidateBuilder:
    """Makes the files of candidates.

    Args:
        traced: Is not changed.
        proof: Has the reference, the bounds and the gates that candidates must keep to.
        folder: Where to write files.
    """

    def __init__(self, job: Job, traced: Traced, call: Call, proof: ParityChecker, folder: Path) -> None:
        self.job, self.traced, self.call, self.proof, self.folder = job, traced, call, proof, folder
        self._graphs: dict[tuple[int, ...], tuple[Writer, tuple[Applied, ...]] | CandidateRejected] = {}
        self._files = 0

    def working(self, recipe: Recipe) -> list[int]:
        """The rules of a recipe that find work, all of them being applied.

        Raises:
            CandidateRejected: One of them raises, or the graph does not pass.
        """
        _, applied = self._graph(recipe)
        return [i for i, done in zip(rules_in(recipe), applied, strict=True) if done.report.changes]

    def make(self, file_format: Format, recipe: Recipe, name: str) -> Artifact:
        """Makes a file, and proves it.

        Args:
            name: What it is called while it is measured.

        Raises:
            CandidateRejected: It cannot be made, or does not pass.
        """
        writer, _ = self._graph(recipe)
        self._files += 1
        folder = self.folder / str(self._files)
        folder.mkdir()

        def build() -> Artifact:
            record = writer.write(file_format, folder, passes_in(recipe), self.job.config.export.opset)
            (artifact,) = exported([record], list(self.job.example), folder, "")
            names = writer.signature.output_names
            for target, run in runners.open_file(artifact.path, file_format, names, writer.device):
                self._check(target, run, traced_shape_only=artifact.fixed)
            return replace(artifact, name=name)

        try:
            return _refusing(build)
        except CandidateRejected:
            shutil.rmtree(folder)
            raise

    def discard(self, artifact: Artifact) -> None:
        """Removes a file that is needed no more; of a large model there is no room for many."""
        shutil.rmtree(artifact.path.parent)

    def _graph(self, recipe: Recipe) -> tuple[Writer, tuple[Applied, ...]]:
        chosen = tuple(rules_in(recipe))
        if chosen not in self._graphs:
            try:
                self._graphs[chosen] = _refusing(lambda: self._transformed(chosen))
            except CandidateRejected as refusal:
                self._graphs[chosen] = refusal
        made = self._graphs[chosen]
        if isinstance(made, CandidateRejected):
            raise made
        return made

    def _transformed(self, chosen: tuple[int, ...]) -> tuple[Writer, tuple[Applied, ...]]:
        done = transform(sharing_copy(self.traced.graph_module), [self.job.rules[i] for i in chosen])
        self._check(GRAPH, graph_runner(done.graph_module, self.call))
        job = self.job
        writer = Writer(
            done.graph_module,
            self.traced.signature,
            job.example,
            job.loaded.weights_sha256,
            done.applied,
            job.config.model.device,
        )
        return writer, done.applied

    def _check(self, target: str, run: runners.Run, *, traced_shape_only: bool = False) -> None:
        proof = ParityChecker(self.proof.reference, self.proof.bounds, self.proof.gates)
        parity = proof.check(target, run, traced_shape_only=traced_shape_only)
        failures = [f"{output.output} {output.failure}" for output in parity.outputs if output.failure is not None]
        failures += [decision.failure for decision in parity.decisions if decision.failure is not None]
        if failures:
            raise CandidateRejected(f"{NOT_THE_SAME} at {target}: {failures[0]}")


def content_of(artifact: Artifact) -> str:
    """A digest of a file that is equal for files that hold the same model, whatever an ONNX file says of its making."""
    if artifact.format != "onnx":
        return hashlib.sha256(artifact.path.read_bytes()).hexdigest()
    model = read_onnx(artifact.path)
    model.ClearField("metadata_props")
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _refusing(make: Callable[[], _Made]) -> _Made:
    try:
        return make()
    except CandidateRejected:
        raise
    except OptexportError as error:
        raise CandidateRejected(f"{error.location}: {error.message}" if error.location else error.message) from error
    except Exception as error:  # passes are the code of many, and a candidate is no more than a try
        raise CandidateRejected(f"it raised {type(error).__name__}: {first_line(error)}") from error
