"""Converts TorchScript programs for ``torch.export``, which cannot trace them at any size."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._export import converter as _converter
from torch._export.passes.replace_quantized_ops_with_standard_ops_pass import (
    replace_quantized_ops_with_standard_ops,
)

from optexport.errors import SourceError, first_line
from optexport.signature.arguments import plain
from optexport.signature.signature import call_signature
from optexport.tracing import dynamo_exporter
from optexport.tracing.model_run import run_or_error

_HINT = "Export the model from its Python source, or export a submodule without loops and state."


def convert(script: torch.jit.ScriptModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Module:
    """Converts a TorchScript program into a module with the same argument names.

    Args:
        script: The program.
        args: Positional arguments to trace with: tensors, constants, and tuples, lists and dicts of them.
        kwargs: Keyword arguments to trace with.

    Raises:
        SourceError: The program has no equivalent graph, because it loops over data or changes its attributes.
    """
    _refuse_state(script)
    signature = call_signature(script)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    converter = None
    try:
        with dynamo_exporter.quiet(), torch.no_grad():
            converter = _converter.TS2EPConverter(script, bound.args)
            blocks, attributes = _converter.get_block_to_lifted_attrs(converter.ts_graph)
            graph_module = _converter.TS2FXGraphConverter(
                converter.ts_graph,
                converter.name_to_param,
                converter.name_to_buffer,
                blocks,
                converter.name_to_non_tensor_attributes,
                converter.name_to_constant,
                attributes,
            ).convert()
            replace_quantized_ops_with_standard_ops(graph_module)
    except Exception as error:  # the converter raises many types
        raise SourceError(
            f"the converter of torch.export cannot convert the program to a graph: {_find_reason(converter, error)}",
            location=_name(script),
            hint=_HINT,
        ) from error
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for placeholder, parameter in zip(placeholders, signature.parameters.values(), strict=True):
        placeholder.target = parameter.name
        if parameter.default is None or isinstance(parameter.default, bool | int | float | str):
            placeholder.args = (parameter.default,)
    graph_module.recompile()
    converted = plain(graph_module, _name(script)).eval()
    _check_runs(script, converted, bound.args)
    return converted


def _check_runs(script: torch.jit.ScriptModule, converted: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuses a graph that fails although its program runs: a defect of the converter."""
    failures: list[Exception | None] = []
    for module in (converted, script):
        try:
            with torch.no_grad(), dynamo_exporter.quiet():
                module(*copy.deepcopy(args))
            failures.append(None)
        except Exception as error:  # a program may raise any error, and tracing calls it again
            failures.append(error)
    graph_error, script_error = failures
    if graph_error is not None and script_error is None:
        raise SourceError(
            f"the program runs, but its graph from the converter of torch.export fails: {first_line(graph_error)}",
            location=_name(script),
            hint=_HINT,
        ) from graph_error


@contextlib.contextmanager
def converting_scripts(model: nn.Module, example: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replaces the TorchScript programs within a model by modules, in the block.

    Args:
        example: Inputs for a call of the model, which shows how it calls the programs.

    Raises:
        SourceError: A program has no equivalent graph.
    """
    places = list(_find_scripts(model))
    calls: dict[int, _Call] = {}
    recorders = {id(script): _Recorder(script, calls) for _, _, script in places}
    try:
        for owner, name, script in places:
            owner._modules[name] = recorders[id(script)]
        if places:
            run_or_error(model, example)  # the trace reports what the model's code raises
        converted = {id(script): _convert_called(script, calls.get(id(script))) for _, _, script in places}
        for owner, name, script in places:
            owner._modules[name] = converted[id(script)]
        yield
    finally:
        for owner, name, script in places:
            owner._modules[name] = script


def _find_scripts(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.jit.ScriptModule]]:
    for name, child in module._modules.items():
        if isinstance(child, torch.jit.ScriptModule):
            yield module, name, child
        elif child is not None:
            yield from _find_scripts(child)


# Positional and keyword arguments.
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Recorder(nn.Module):
    """Calls a program and records the arguments of its first call."""

    def __init__(self, script: torch.jit.ScriptModule, calls: dict[int, _Call]) -> None:
        super().__init__()

        def call(*args: Any, **kwargs: Any) -> Any:
            if id(script) not in calls:
                calls[id(script)] = copy.deepcopy((args, kwargs))
            return script(*args, **kwargs)

        # A closure: a script in an attribute would count as state, which the run restores, and as a submodule would
        # rename weights.
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _convert_called(script: torch.jit.ScriptModule, call: _Call | None) -> nn.Module:
    """Returns a program as a module; an empty module if the model never calls the program."""
    return nn.Module() if call is None else convert(script, *call)


def _name(script: torch.jit.ScriptModule) -> str:
    return str(script.original_name)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _refuse_state(script: torch.jit.ScriptModule) -> None:
    """Refuses a program that changes its attributes, because a graph has no state."""
    for node in _nodes(script.inlined_graph):
        if node.kind() == "prim::SetAttr":
            raise SourceError(
                f"the program changes its attribute {node.s('name')} in a call (prim::SetAttr, {_line(str(node))})",
                location=_name(script),
                hint=_HINT,
            )


def _line(node: str) -> str:
    """Returns the file and line of a node's source, from the text of the node."""
    match = re.search(r"# ([^\s\]]+?):(\d+):\d+", node)
    return f"{Path(match.group(1)).name}, line {match.group(2)}" if match else "unknown line"


def _find_reason(converter: _converter.TS2EPConverter | None, error: Exception) -> str:
    """Returns the unsupported operators with their lines, or the converter's own error."""
    explanation = "" if converter is None else str(converter.explain(print_output=False))
    nodes = re.findall(r"^ *\d+\. (\S+) \[(.*)", explanation, re.MULTILINE)
    unsupported = dict.fromkeys((kind, _line(node)) for kind, node in nodes)
    return ", ".join(f"{kind} ({line})" for kind, line in unsupported) or first_line(error)
