"""Exports TorchScript by scripting the ATen graph, because tracing would fix every size."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from optexport._utils.user_lines import find_node_line
from optexport.errors import ExportError, first_line
from optexport.exporters import torch_passes
from optexport.exporters.disk_space import check_disk_space
from optexport.exporters.scriptable import SCALARS, make_scriptable
from optexport.signature.signature import Signature, as_arguments
from optexport.tracing import dynamo_exporter

aten = torch.ops.aten

# Operators that turn tensor values into Python numbers or sizes.
_VALUE_READERS = (*SCALARS, aten.nonzero.default, aten.masked_select.default)


def save(
    program: ExportedProgram,
    signature: Signature,
    example: Mapping[str, torch.Tensor],
    path: Path,
    *,
    passes: Sequence[str] = (),
) -> str | None:
    """Writes a TorchScript file that takes the inputs by name and returns a tuple of tensors.

    Args:
        program: Flat program: tensors in, a tuple of tensors out.
        example: Inputs for a trace, used if the graph cannot be scripted.
        passes: Names of `optexport.exporters.torch_formats`; names of other formats are ignored.

    Returns:
        None for a scripted file. For a traced file, the reason; such a file accepts only the example's shapes.

    Raises:
        ExportError: The graph can be neither scripted nor traced.
        OSError: The disk is full.
    """
    weights = dict.fromkeys([*program.graph_signature.parameters, *program.graph_signature.buffers])
    for name in (*(spec.name for spec in signature.inputs), *signature.output_names, *weights):
        if not name.isascii():
            raise ExportError(
                f"TorchScript does not support the name {name}, which is not ASCII",
                location="export.formats: torchscript",
                hint='Rename it in ASCII, or leave "torchscript" out of export.formats.',
            )
    fast_program = torch_passes.apply_passes(program, passes, "torchscript")
    graph_module = fast_program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    problem: _Problem | None = None
    with dynamo_exporter.quiet():  # hides the deprecation warning of TorchScript, which the user chose
        try:
            module = compile_in_new_unit(lambda: torch.jit.script(make_scriptable(graph_module, signature)))
        except Exception as error:  # the TorchScript compiler raises many types of exceptions
            problem = _find_problem(error, graph_module.graph)
            graph_module = program.module(check_guards=False)  # torch.jit.trace refuses some operators of passes
            assert isinstance(graph_module, fx.GraphModule)
            module = compile_in_new_unit(partial(_trace, graph_module, signature, example, problem))
        if "freeze" in passes:
            module = torch_passes.freeze(module)
        check_disk_space(path, program)
        torch.jit.save(module, str(path))
    return None if problem is None else problem.message


@dataclass(frozen=True)
class _Problem:
    """Reason why a graph cannot be scripted, with the operator and the line of the model."""

    message: str
    hint: str


def _find_problem(error: Exception, graph: fx.Graph) -> _Problem:
    reason, hint = (
        first_line(error).rstrip(":"),
        'leave "torchscript" out of export.formats; "pt2" supports the same graph',
    )
    # The error shows the line of the graph's code and points at it: name = operator(...).
    match = re.search(r"^ *(\w+) = [^\n]*\n *~+ *<--- HERE", str(error), re.MULTILINE)
    culprits = [node for node in graph.nodes if match is not None and node.name == match.group(1)]
    culprits += [node for node in graph.nodes if _is_unsupported(node.target)]
    node = next(iter(culprits), None)
    if node is None:
        return _Problem(f"TorchScript cannot compile the graph ({reason})", f"{hint[0].upper()}{hint[1:]}.")
    operator = torch.typename(node.target) if callable(node.target) else str(node.target)
    line = find_node_line(node.stack_trace)
    return _Problem(
        f"TorchScript cannot compile {operator}{f', at {line}' if line else ''} ({reason})",
        f"Replace {operator} by other operators{' in that line' if line else ''}, or {hint}.",
    )


def _is_unsupported(target: Any) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator) and target is not torch.ops.higher_order.cond


def _trace(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor], problem: _Problem
) -> torch.jit.ScriptModule:
    inputs = as_arguments({spec.name: example[spec.name] for spec in signature.inputs})
    if any(node.target in _VALUE_READERS for node in graph_module.graph.nodes):
        raise ExportError(
            f"{problem.message}, and a trace would fix values that it computes from the example",
            location="export.formats: torchscript",
            hint=problem.hint,
        )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # The returned reason reports that sizes are fixed.
            warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
            # Export again without dynamic sizes, because torch.jit.trace cannot trace computations with them.
            fixed = torch.export.export(graph_module, (), copy.deepcopy(inputs)).module(check_guards=False)
            module = torch.jit.trace(fixed, example_kwarg_inputs=copy.deepcopy(inputs), check_trace=False)
    except Exception as error:  # the compiler raises many types of exceptions
        raise ExportError(
            f"{problem.message}, and torch.jit.trace fails too ({first_line(error)})",
            location="export.formats: torchscript",
            hint=problem.hint,
        ) from error
    assert isinstance(module, torch.jit.ScriptModule)
    return module


def compile_in_new_unit(compile_: Callable[[], torch.jit.ScriptModule]) -> torch.jit.ScriptModule:
    """Scripts or traces a module with an empty compilation unit.

    torch adds a number to a class name that is already taken, and a failed attempt leaves an incomplete class. Both
    would change the file and the next error. Earlier compiled code still works and cannot access the new code. This
    function is not thread-safe, because torch has one global compilation unit.
    """
    state: Any = torch.jit._state
    recursive: Any = torch.jit._recursive
    earlier = state._python_cu, recursive.concrete_type_store
    unit: Any = torch._C.CompilationUnit()
    state._python_cu, recursive.concrete_type_store = unit, recursive.ConcreteTypeStore()
    try:
        module = compile_()
    finally:
        state._python_cu, recursive.concrete_type_store = earlier
    for function in unit.get_functions():
        _remove_source_locations(function.graph)
    return module


def _remove_source_locations(block: Any) -> None:
    """Removes Python source locations from every node: paths, and fx's per-process counters.

    An error in the file still shows the line of the file's TorchScript code.
    """
    graph: Any = torch._C.Graph()  # must stay alive as long as its node
    nowhere = graph.create("prim::Constant")
    returns = block.return_node() if isinstance(block, torch._C.Graph) else block.returnNode()
    for node in (*block.nodes(), returns):
        node.copyMetadata(nowhere)
        for inner in node.blocks():
            _remove_source_locations(inner)
