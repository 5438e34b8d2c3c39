"""TorchScript, by scripting the ATen graph: every size stays dynamic, as tracing would not leave it."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from optexport.errors import ExportError, first_line
from optexport.exporters.disk_space import check_room
from optexport.exporters.torchscript import passes as torch_passes
from optexport.exporters.torchscript.isolation import compile_afresh
from optexport.signature.signature import Signature, as_argument, as_arguments
from optexport.tracing import transformers_exporter

aten = torch.ops.aten

# What an exported graph asserts about its inputs; TorchScript has no schema for them, and computes the same without.
_ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)

# What takes the one value of a tensor, of which TorchScript has to be told what number it is.
_SCALARS = (aten.item.default, aten._local_scalar_dense.default)
_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# What turns values into numbers of Python, or into sizes.
_VALUES = (*_SCALARS, aten.nonzero.default, aten.masked_select.default)

# What is computed with sizes, in TorchScript's words.
_SIZES: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: aten.size,
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_not: operator.not_,
    torch.sym_sum: sum,
}


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
        program: Flat: tensors in, a tuple of tensors out.
        example: Inputs to trace with, where the graph cannot be scripted.
        passes: Names of `optexport.config.format_passes`; those of other formats are passed over.

    Returns:
        None, or, where only a trace could be had, the reason; such a file works at the example's shapes only.

    Raises:
        ExportError: It can be neither scripted nor traced.
        OSError: The disk is full.
    """
    weights = dict.fromkeys([*program.graph_signature.parameters, *program.graph_signature.buffers])
    for name in (*(spec.name for spec in signature.inputs), *signature.output_names, *weights):
        if not name.isascii():
            raise ExportError(
                f"TorchScript cannot hold the name {name}",
                location="export.formats: torchscript",
                hint='Write it in ASCII, or leave "torchscript" out of export.formats.',
            )
    program = torch_passes.lower(program, passes, "torchscript")
    graph_module = program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    with transformers_exporter.quiet():  # TorchScript is deprecated, and asked for
        try:
            module = compile_afresh(lambda: torch.jit.script(scriptable(graph_module, signature)))
            reason = None
        except Exception as error:  # the TorchScript compiler raises many kinds
            reason = first_line(error)
            module = compile_afresh(partial(_trace, graph_module, signature, example, reason))
        if "freeze" in passes:
            module = torch_passes.freeze(module)
        check_room(path, program)
        torch.jit.save(module, str(path))
    return reason


def scriptable(graph_module: fx.GraphModule, signature: Signature | None = None) -> fx.GraphModule:
    """The graph as TorchScript reads it: operators without overload names, a plain signature, no assertions.

    Args:
        signature: Names the inputs; without it they keep their names.
    """
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(tuple(torch.utils._pytree.tree_leaves(output)))
    if signature is not None:
        for placeholder, spec in zip(graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
            placeholder.target = as_argument(spec.name)
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS or (node.op == "call_module" and node.target == "_guards_fn"):
            graph.erase_node(node)
    graph.eliminate_dead_code()  # before the overload goes, which tells what changes its argument in place
    for node in graph.nodes:
        if node.target in _SIZES:
            node.target = _SIZES[node.target]
        elif node.target in _SCALARS and type(node.meta.get("val")) in _NUMBERS:
            node.target = _NUMBERS[type(node.meta["val"])]
        elif isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket
    return fx.GraphModule(graph_module, graph)


def _trace(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor], reason: str
) -> torch.jit.ScriptModule:
    inputs = as_arguments({spec.name: example[spec.name] for spec in signature.inputs})
    if any(node.target in _VALUES for node in graph_module.graph.nodes):
        raise ExportError(
            f"the graph cannot be scripted ({reason}), and a trace would hold values of its example",
            location="export.formats: torchscript",
            hint='Leave "torchscript" out of export.formats; "pt2" carries the same graph.',
        )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", torch.jit._trace.TracerWarning
            )  # that sizes are fixed is what the reason is for
            # Once more without dynamic sizes, since what is computed with them cannot be traced.
            fixed = torch.export.export(graph_module, (), copy.deepcopy(inputs)).module(check_guards=False)
            module = torch.jit.trace(fixed, example_kwarg_inputs=copy.deepcopy(inputs), check_trace=False)
    except Exception as error:  # the compiler raises whatever it meets on its way
        raise ExportError(
            f"the graph can be neither scripted ({reason}) nor traced ({first_line(error)})",
            location="export.formats: torchscript",
            hint='Leave "torchscript" out of export.formats; "pt2" carries the same graph.',
        ) from error
    assert isinstance(module, torch.jit.ScriptModule)
    return module
