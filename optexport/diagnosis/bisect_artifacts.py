"""Search for the first divergence between a failed artifact and a graph that passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from torch import fx

from optexport.diagnosis.divergence import Comparison, compare, lost, told
from optexport.diagnosis.intermediates import Observed, observe_graph, observe_onnx, observe_torchscript
from optexport.diagnosis.reproduction import Finding, Reproduction, failing_case, incomparable, outputs_at
from optexport.diagnosis.subgraph import cut_onnx
from optexport.parity import checker
from optexport.parity.checker import ParityChecker
from optexport.runtime import runners
from optexport.runtime.devices import Device
from optexport.runtime.untrusted import archives
from optexport.signature.signature import Batch

_OBSERVERS: Mapping[str, Callable[[Path, Batch], Observed]] = {
    "onnx": observe_onnx,
    "torchscript": observe_torchscript,
    "pt2": lambda path, batch: observe_graph(archives.pt2_module(path, check_guards=False), batch),
}


_ON_THE_CPU = (
    "Where its values part is looked for on the CPU alone: leave out model.device to see whether they do there."
)


def blame_files(
    graph_module: fx.GraphModule | None, files: Mapping[str, Path], proof: ParityChecker, device: Device
) -> Finding:
    """Finds the first value at which a failed artifact diverges from a graph that passes.

    Values inside an artifact are compared on the CPU only. For another device, the finding names the case only.

    Args:
        graph_module: Flat graph, with tensors as inputs and a tuple of outputs. None if no graph passes.
        files: Artifacts by format.
        proof: Checker with at least one failed target.
        device: Device of the artifacts.

    Returns:
        The explanation, and scripts that reproduce the failure.
    """
    target = next(target for target in proof.targets if not target.passed)
    file_format = target.target.partition("-")[0]
    path, index = files[file_format], failing_case(proof, target)
    case = proof.reference.cases[index]
    if device != "cpu":
        return Finding(target.target, index, f"{path.name} fails on {device}, at {case.name}. {_ON_THE_CPU}")
    outputs, expected = outputs_at(proof, target, index)

    def write(folder: Path) -> None:
        for file in (path, path.with_name(f"{path.name}.data")):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)

    raises = isinstance(proof.result(target.target, case.name), str)
    title = f"{path.name} differs from the original at {case.name}."
    whole = Reproduction(title, path.name, expected, outputs, write, raises=raises)
    if target.target in (checker.ONNX_OPTIMIZED, checker.ONNX_FLOAT32_OPTIMIZED):  # it passes unoptimized
        text = _blame_runtime(path, proof, index)
        return Finding(target.target, index, text, [replace(whole, level="ORT_ENABLE_ALL")])
    lines = [f"The graph passes, and {path.name} does not: the exporter or the runtime changed the numbers."]
    if graph_module is None:
        return Finding(target.target, index, f"{path.name} fails, and no .pt2 file passes to compare it with.", [whole])
    pieces: list[Reproduction] = []
    try:
        original = observe_graph(graph_module, case.batch)
        exact = observe_graph(graph_module, case.batch, double=True)
        comparison = compare(original, _OBSERVERS[file_format](path, case.batch), exact, by_name=False)
        lines.append(told(comparison.parting, case.name, incomparable(target, case.name)))
        if comparison.parting is not None and comparison.parting.inner is not None:
            if file_format == "onnx":
                piece, made_by = _onnx_piece(path, graph_module, case.batch, comparison)
                pieces.append(piece)
                lines.append(made_by)
            else:
                lines.append("In the file it is {} ({}).".format(*comparison.parting.inner))
    except Exception as error:  # each runtime raises its own error types
        lines.append(lost(error))
    return Finding(target.target, index, "\n".join(lines), [*pieces, whole])


def _blame_runtime(path: Path, proof: ParityChecker, case: int) -> str:
    """Names the first optimization level of ONNX Runtime at which a file fails."""
    alone, below = proof.reference.select([case]), "ORT_DISABLE_ALL"
    for level in ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        run = runners.open_onnx(path, list(proof.tolerances), optimized=True, level=level)
        if not ParityChecker(alone, proof.tolerances).check(checker.ONNX, run).passed:
            break
        below = level
    return (
        f"The file passes as it stands: the runtime's optimizations change the numbers, from {level} on. Where it is "
        f"used, set session_options.graph_optimization_level = GraphOptimizationLevel.{below}."
    )


def _onnx_piece(
    path: Path, graph_module: fx.GraphModule, batch: Batch, comparison: Comparison
) -> tuple[Reproduction, str]:
    """Cuts out the failing part of an ONNX file, after the last match, and describes it."""
    parting = comparison.parting
    assert parting is not None and parting.inner is not None
    inner = parting.inner[0]
    given = observe_onnx(path, batch, keep=set(comparison.matched.values()) - {inner}).whole
    piece, inputs = cut_onnx(path, inner, given)
    expected = observe_graph(graph_module, batch, keep={parting.node}).whole[parting.node]
    tensors = {f"inputs.{name}": given[name] for name in inputs} | {f"expected.{inner}": expected}
    reproduction = Reproduction(
        f"What {path.name} computes at {inner} differs from {parting.node} of the graph.",
        "piece.onnx",
        "expected",
        {inner: (parting.limit, expected.dtype)},
        lambda folder: onnx.save(piece, folder / "piece.onnx"),
        tensors,
    )
    operators = ", ".join(node.op_type for node in piece.graph.node if node.op_type != "Constant")
    weights = ", ".join(weight.name for weight in piece.graph.initializer)
    text = f"In the file it is {inner}, made of {', '.join(inputs) or 'constants'} by {operators}"
    return reproduction, f"{text} with {weights}." if weights else f"{text}."
