"""Runs the pipeline with a fault."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import fx

from optexport import export
from optexport.errors import ParityError
from optexport.exporters import pt2, torchscript
from optexport.exporters.onnx import exporter as onnx_exporter
from optexport.parity import noise_floor
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.target_check import TargetChecker
from optexport.pipeline import steps
from optexport.report.result import Result
from optexport.runtime import runners
from optexport.tracing.trace import Traced
from optexport.tracing.trace import trace as trace_model
from optexport.transformations import RemoveNoOps, ShareEqual, Transformation
from tests.faults.catalogue import Fault
from tests.faults.subjects import Subject, subject

_WRITERS = {"onnx": onnx_exporter, "torchscript": torchscript, "pt2": pt2}
# Removed when the tests end.
_PLACE = tempfile.TemporaryDirectory(prefix="optexport-faults-")


class Seeded(Transformation):
    """A rule that applies a correct rule, if the fault names one, and then the mistake."""

    preserves_computation = True

    def __init__(self, fault: Fault) -> None:
        self.fault = fault.name
        self._fault = fault

    @property
    def signature(self) -> str:
        return self.fault

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        if self._fault.after is not None:
            graph_module = self._fault.after(graph_module)
        changed = self._fault.mistake(graph_module, **self._fault.options)
        for node in [changed] if isinstance(changed, fx.Node) else changed:
            self.mark_as_transformed(node)
        return graph_module


@functools.cache
def traced(name: str) -> Traced:
    """Returns the trace of a subject. Callers share it and must not change it."""
    chosen = subject(name)
    return trace_model(chosen.model, chosen.inputs, chosen.dynamic)


@contextmanager
def traced_once(chosen: Subject) -> Iterator[None]:
    """Reuses the trace of a subject, because tracing takes longer than the rest of a run."""

    def trace(*args: Any, **kwargs: Any) -> Traced:
        cached = traced(chosen.name)
        return replace(cached, graph_module=copy.deepcopy(cached.graph_module))

    with patch.object(steps, "trace", trace):
        yield


def run(name: str, output: Path, rules: tuple[Transformation, ...], formats: tuple[str, ...]) -> Result:
    """Runs the pipeline on a subject.

    Raises:
        ParityError: A parity check failed.
    """
    chosen = subject(name)
    # The search for the smallest failing input is slow, and other tests cover it.
    with traced_once(chosen), patch.object(TargetChecker, "find_smallest_failing", lambda self: None):
        return export(
            chosen.model, chosen.inputs, output, transformations=rules, formats=formats, dynamic=chosen.dynamic
        )


def prepare(fault: Fault) -> None:
    """Caches the trace and the correct files that a run with this fault needs."""
    traced(fault.on)
    if not fault.by_a_rule:
        _honest(fault.on, fault.fails[0].partition("-")[0])


def run_with(fault: Fault, output: Path) -> Result:
    """Runs the pipeline with a fault. A correct rule runs before and after the faulty one.

    Raises:
        ParityError: A parity check caught the fault.
    """
    before, after = RemoveNoOps(), ShareEqual()
    if fault.by_a_rule:
        return run(fault.on, output, (before, Seeded(fault), after), ("pt2",))
    file_format = fault.fails[0].partition("-")[0]
    honest = _honest(fault.on, file_format)
    with ExitStack() as patches:
        if fault.fails == ("onnx-optimized",):
            patches.enter_context(_spoilt_runtime(fault))
            mistake: Callable[..., None] = _do_nothing
        else:
            mistake = functools.partial(fault.mistake, **fault.options)
        patches.enter_context(_spoilt_writer(file_format, honest, mistake))
        return run(fault.on, output, (before, after), (file_format,))


def _do_nothing(path: Path) -> None:
    pass


@functools.cache
def _honest(name: str, file_format: str) -> Path:
    """Returns a folder with the correct file for a subject, and its companion files."""
    folder = Path(_PLACE.name) / f"{name} {file_format}"
    run(name, folder, (RemoveNoOps(), ShareEqual()), (file_format,))
    return folder


@contextmanager
def _spoilt_writer(file_format: str, honest: Path, mistake: Callable[[Path], None]) -> Iterator[None]:
    """Makes an exporter write the correct file from the cache and then apply the mistake to it."""

    def write(*args: Any, **kwargs: Any) -> None:
        (path,) = [value for value in (*args, *kwargs.values()) if isinstance(value, Path)]
        shutil.copy(honest / path.name, path)
        mistake(path)

    with ExitStack() as patches:
        patches.enter_context(patch.object(_WRITERS[file_format], "write" if file_format == "onnx" else "save", write))
        if file_format == "onnx":  # the converted model is not written
            patches.enter_context(patch.object(onnx_exporter, "convert", lambda *args: None))
        yield


@contextmanager
def _spoilt_runtime(fault: Fault) -> Iterator[None]:
    """Makes ONNX Runtime apply the mistake if it optimizes, and only then."""
    honest = runners.open_onnx

    def open_onnx(path: Path, *args: Any, optimized: bool, **kwargs: Any) -> runners.Run:
        if not optimized:
            return honest(path, *args, optimized=optimized, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(shutil.copy(path, folder))
            fault.mistake(copied, **fault.options)
            return honest(copied, *args, optimized=optimized, **kwargs)

    with patch.object(runners, "open_onnx", open_onnx):
        yield


@dataclass
class Passes:
    """For each target, in the order of the checks: whether it passes at each multiple."""

    targets: dict[str, dict[float, bool]]

    def caught(self, multiple: float) -> bool:
        """Returns True if a check fails at a multiple."""
        return any(not passed[multiple] for passed in self.targets.values())


@contextmanager
def watched(multiples: tuple[float, ...]) -> Iterator[Passes]:
    """Repeats the first check of every target at other multiples, and records the results."""
    honest, noted = ParityChecker.check, Passes({})

    def passes(checker: ParityChecker, target: str, candidate: runners.Run, multiple: float, **kwargs: Any) -> bool:
        try:
            tolerances = noise_floor.measure_tolerances(checker.reference, multiple)
        except ParityError:  # a limit that would let anything pass is refused
            return False
        return honest(ParityChecker(checker.reference, tolerances), target, candidate, **kwargs).passed

    def check(self: ParityChecker, target: str, candidate: runners.Run, **kwargs: Any) -> TargetParity:
        if target not in noted.targets:  # later checks belong to the search for the cause
            noted.targets[target] = {m: passes(self, target, candidate, m, **kwargs) for m in multiples}
        return honest(self, target, candidate, **kwargs)

    with patch.object(ParityChecker, "check", check):
        yield noted
