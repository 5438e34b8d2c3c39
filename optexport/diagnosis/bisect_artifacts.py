"""Search for the first divergence between a failed artifact and a graph that passes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import torch
from torch import fx, nn

from optexport._utils import model_memory
from optexport._utils.user_lines import find_node_line
from optexport.diagnosis.divergence import Comparison, compare, describe_divergence, describe_search_error
from optexport.diagnosis.failure import find_unmeasured_output, find_unnamed_case
from optexport.diagnosis.intermediates import Observed, observe_graph, observe_onnx, observe_torchscript
from optexport.diagnosis.reproduction import Finding, Reproduction, failing_case, outputs_at
from optexport.diagnosis.subgraph import extract_onnx
from optexport.exporters.registry import get_format
from optexport.parity import checker, perturbation
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.runtime import runners
from optexport.runtime.devices import Device
from optexport.runtime.untrusted import archives
from optexport.signature.signature import Batch, as_arguments

# How to read the values inside of a file, for formats that allow it.
_OBSERVERS: Mapping[str, Callable[[Path, Batch], Observed]] = {
    "onnx": observe_onnx,
    "torchscript": observe_torchscript,
    "pt2": lambda path, batch: observe_graph(archives.pt2_module(path, check_guards=False), batch),
}


def diagnose_artifacts(
    graph_module: fx.GraphModule | None, files: Mapping[str, Path], parity_checker: ParityChecker, device: Device
) -> Finding:
    """Finds the first value at which a failed artifact diverges from a graph that passes.

    Values inside an artifact are compared on the CPU only. For another device, the finding names the case only.

    Args:
        graph_module: Flat graph, with tensors as inputs and a tuple of outputs. None if no graph passes.
        files: Artifacts by format.
        parity_checker: Checker with at least one failed target.
        device: Device of the artifacts.

    Returns:
        The explanation, and scripts that reproduce the failure.
    """
    target = next(target for target in parity_checker.targets if not target.passed)
    file_format = target.target.partition("-")[0]
    path, index = files[file_format], failing_case(parity_checker, target)
    case = parity_checker.reference.cases[index]
    if device != "cpu":
        text = f"{path.name} fails on {device} (case: {case.name}). The first difference is searched on the CPU only."
        return Finding(target.target, index, text, hint="Remove model.device to see if the file fails on the CPU too.")
    outputs, expected = outputs_at(parity_checker, target, index)

    def write(folder: Path) -> None:
        for file in get_format(file_format).existing_files(path):
            shutil.copyfile(file, folder / file.name)

    raises = isinstance(parity_checker.result(target.target, case.name), str)
    title = f"{path.name} differs from the original (case: {case.name})."
    complete = Reproduction(title, path.name, expected, outputs, write, raises=raises)
    if target.target in (checker.ONNX_OPTIMIZED, checker.ONNX_FLOAT32_OPTIMIZED):  # it passes unoptimized
        text, hint = _diagnose_optimizations(path, parity_checker, index)
        return Finding(target.target, index, text, [replace(complete, level="ORT_ENABLE_ALL")], hint)
    if file_format not in _OBSERVERS:
        text = f"{path.name} fails. The diverging node is found in ONNX, TorchScript and .pt2 files only."
        return Finding(target.target, index, text, [complete])
    lines = [f"The graph passes, so the exporter or {get_format(file_format).runtime} changed the numbers."]
    if graph_module is None:
        text = f"{path.name} fails, and there is no .pt2 file that passes to compare it with."
        return Finding(target.target, index, text, [complete])
    pieces: list[Reproduction] = []
    jump_hint: str | None = None
    try:
        original = observe_graph(graph_module, case.batch)
        exact = observe_graph(graph_module, case.batch, double=True)
        comparison = compare(original, _OBSERVERS[file_format](path, case.batch), exact, by_name=False)
        divergence, problem = comparison.divergence, find_unmeasured_output(target, case.name)
        lines.append(describe_divergence(divergence, find_unnamed_case(target, case.name), problem))
        if divergence is not None and divergence.in_target is not None:
            if file_format == "onnx":
                piece, computation = _onnx_piece(path, graph_module, case.batch, comparison)
                pieces.append(piece)
                lines.append(f"In {path.name}: {computation}.")
            else:
                lines.append(f"In {path.name}: {divergence.in_target[0]} ({divergence.in_target[1]}).")
            with contextlib.suppress(Exception):  # some models cannot be copied
                jump, jump_hint = _describe_jump(graph_module, parity_checker, target, index, divergence.node)
                lines += jump
    except Exception as error:  # each runtime raises its own error types
        lines.append(describe_search_error(error))
    return Finding(target.target, index, "\n".join(lines), [*pieces, complete], jump_hint)


def _describe_jump(
    graph_module: fx.GraphModule, parity_checker: ParityChecker, target: TargetParity, index: int, diverging: str
) -> tuple[list[str], str | None]:
    """Returns a line about a rounding step before a node, and a hint, if the step explains the failure.

    It does if the original with perturbed weights is as far from float64 as the file.
    """
    reference = parity_checker.reference.select([index])
    case = reference.cases[0]
    step = _find_rounding_step(graph_module, observe_graph(graph_module, case.batch), diverging)
    failing = {
        (output.output, result.case): result.distance
        for output in target.outputs
        for result in output.cases
        if result.failure and not parity_checker.tolerances[output.output].fixed
    }
    if step is None or not failing or model_memory.is_large(graph_module):
        return [], None
    names = list(parity_checker.tolerances)

    def call(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return dict(zip(names, model(**as_arguments(batch)), strict=True))

    farthest = perturbation.measure_farthest(reference, call, graph_module, seed=0)
    if any(distance > _FARTHEST_TIMES * farthest[key] for key, distance in failing.items() if key in farthest):
        return [], None
    line = find_node_line(step.stack_trace)
    text = (
        f"{step.name}{f' at {line}' if line else ''} makes whole numbers or booleans, and rounding decides some of"
        f" them: the original changes by {max(farthest.values()):.1e} if its weights move by half a unit in the last"
        " place."
    )
    hint = (
        f"Set parity.atol to what such a step may change in the output (more than {max(failing.values()):.1e} here), or"
        " move the step out of the model."
    )
    return [text], hint


# Measured changes are those of some perturbed models only, so a file may be this many times farther from the original.
_FARTHEST_TIMES = 2


def _find_rounding_step(graph_module: fx.GraphModule, observed: Observed, before: str) -> fx.Node | None:
    """Returns the last node before another one that makes whole numbers or booleans from other numbers."""
    nodes = {node.name: node for node in graph_module.graph.nodes}
    waiting, ancestors = [before], {before}
    while waiting:
        new = {*observed.needs.get(waiting.pop(), ())} - ancestors
        ancestors |= new
        waiting += new
    steps = [
        name
        for name, value in observed.values.items()
        if name in ancestors
        and _is_whole(value.tensor)
        and any(
            read in observed.values and not _is_whole(observed.values[read].tensor) for read in observed.needs[name]
        )
    ]
    return nodes[steps[-1]] if steps else None


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


def _diagnose_optimizations(path: Path, parity_checker: ParityChecker, case: int) -> tuple[str, str]:
    """Returns a text about the first optimization level of ONNX Runtime at which a file fails, and a hint."""
    reference, level_below = parity_checker.reference.select([case]), "ORT_DISABLE_ALL"
    for level in ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        run = runners.open_onnx(path, list(parity_checker.tolerances), optimized=True, level=level)
        if not ParityChecker(reference, parity_checker.tolerances).check(checker.ONNX, run).passed:
            break
        level_below = level
    return (
        f"The file passes without optimizations, so ONNX Runtime's optimizations of level {level} changed the numbers.",
        f"Set session_options.graph_optimization_level = GraphOptimizationLevel.{level_below} when you run the file.",
    )


def _onnx_piece(
    path: Path, graph_module: fx.GraphModule, batch: Batch, comparison: Comparison
) -> tuple[Reproduction, str]:
    """Extracts the failing part of an ONNX file, after the last match, and describes its computation."""
    divergence = comparison.divergence
    assert divergence is not None and divergence.in_target is not None
    name = divergence.in_target[0]
    boundary = observe_onnx(path, batch, keep=set(comparison.matched.values()) - {name}).complete
    piece, inputs = extract_onnx(path, name, boundary)
    expected = observe_graph(graph_module, batch, keep={divergence.node}).complete[divergence.node]
    tensors = {f"inputs.{input_name}": boundary[input_name] for input_name in inputs} | {f"expected.{name}": expected}
    reproduction = Reproduction(
        f"The value of {name} in {path.name} differs from {divergence.node} in the graph.",
        "piece.onnx",
        "expected",
        {name: (divergence.limit, expected.dtype)},
        lambda folder: onnx.save(piece, folder / "piece.onnx"),
        tensors,
    )
    operators = ", ".join(node.op_type for node in piece.graph.node if node.op_type != "Constant")
    weights = ", ".join(weight.name for weight in piece.graph.initializer)
    text = f"{name}, computed from {', '.join(inputs) or 'constants'} by {operators}"
    return reproduction, f"{text} with {weights}" if weights else text
