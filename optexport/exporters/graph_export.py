"""Exports a graph as an ``ExportedProgram``, which every format is written from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dynamo.exc import UserError
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from optexport.errors import ExportError, first_line
from optexport.signature.signature import Signature, TensorSpec, as_argument, as_arguments
from optexport.tracing import dynamo_exporter
from optexport.tracing.shapes.size_guards import drop_own_exclusions


def flatten(graph_module: fx.GraphModule, signature: Signature) -> fx.GraphModule:
    """Returns the same graph with inputs in the signature's order and a flat tuple of outputs.

    A file with a transformers class as output does not load without transformers. An output that repeats another output
    or an input is cloned, because formats with named outputs need separate tensors.

    Args:
        graph_module: Not changed.
        signature: Gives the names and the order of the inputs.
    """
    graph = fx.Graph()
    outputs = graph.graph_copy(graph_module.graph, {})
    for placeholder, spec in zip(graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
        placeholder.target = as_argument(spec.name)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if _is_tensor(leaf)]
    outputs_so_far: set[fx.Node] = set()
    flat = []
    for leaf in leaves:
        if leaf in outputs_so_far or leaf.op in ("placeholder", "get_attr"):
            leaf = graph.call_function(torch.clone, (leaf,))
        outputs_so_far.add(leaf)
        flat.append(leaf)
    graph.output(tuple(flat))
    return fx.GraphModule(graph_module, graph)


def _is_tensor(leaf: object) -> TypeGuard[fx.Node]:
    """Returns True if an output is a tensor, not a size or a constant."""
    return isinstance(leaf, fx.Node) and not isinstance(
        leaf.meta.get("val"), (torch.SymInt, torch.SymFloat, int, float)
    )


def to_program(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor]
) -> ExportedProgram:
    """Exports a flat graph with every declared dimension dynamic.

    Args:
        graph_module: A graph as returned by `flatten`.
        signature: Names the inputs and their dynamic dimensions.
        example: Inputs at the traced sizes, by name.

    Raises:
        ExportError: The graph fixes a dimension, or contains something that ``torch.export`` does not support.
    """
    inputs = as_arguments({spec.name: example[spec.name] for spec in signature.inputs})
    try:
        try:
            program = _export(graph_module, inputs, signature.dynamic_shapes())
        except (UserError, AssertionError, ValueError) as error:
            if not any(message in str(error) for message in _SOLVER_ERRORS):
                raise
            program = _export(graph_module, inputs, signature.dynamic_shapes(named=False))
            if not _is_dynamic(program, signature):
                raise
    except Exception as error:  # torch.export raises many types of exceptions
        raise ExportError(
            f"torch.export rejects the transformed graph: {first_line(error)}",
            location="export",
            hint="Leave out one rule after the other to find the rule that causes this.",
        ) from error
    _check_ranges(program, signature)
    _lower_minima(program, signature)
    drop_own_exclusions(program, graph_module)
    return program


# Messages of torch.export when its solver allows only one size, or none, for a named dimension. It does so wrongly for
# linear attention over chunks and for padding to a multiple. It does not solve for unnamed dimensions.
_SOLVER_ERRORS = (
    "Specializations unexpectedly required",
    "Cannot create Dim with inconsistent",
    "Constraints violated",
    "too many values to unpack",  # the solver cannot read its own result a <= b <= c
)


def _export(
    graph_module: fx.GraphModule, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Any]
) -> ExportedProgram:
    with dynamo_exporter.exporting(), _math_attention_if_data_dependent(graph_module):
        return dynamo_exporter.export_module(graph_module, inputs, shapes)


def _math_attention_if_data_dependent(graph_module: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Forces the math backend for attention if its shapes depend on data.

    The faster kernels check for an empty input, which tracing cannot decide. The graph still contains the operator.
    """
    attended = (
        argument.meta.get("val")
        for node in graph_module.graph.find_nodes(op="call_function", target=_ATTENTION)
        for argument in node.all_input_nodes
    )
    unknown = any(isinstance(value, torch.Tensor) and free_unbacked_symbols(value) for value in attended)
    return sdpa_kernel(SDPBackend.MATH) if unknown else contextlib.nullcontext()


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def _is_dynamic(program: ExportedProgram, signature: Signature) -> bool:
    """Returns True if no dynamic axis of the signature was fixed or limited to one size."""
    single = {symbol for symbol, limits in program.range_constraints.items() if limits.is_singleton()}
    return all(
        isinstance(traced_size, torch.SymInt) and traced_size.node.expr.free_symbols - single
        for spec, placeholder in _inputs(program, signature)
        for size, traced_size in zip(spec.shape, placeholder.meta["val"].shape, strict=True)
        if isinstance(size, str)
    )


def _check_ranges(program: ExportedProgram, signature: Signature) -> None:
    """Checks that each exported range reaches the signature's maximum.

    ``torch.export`` narrows ranges of unnamed dimensions. A larger minimum is accepted, because tracing assumes sizes
    >= 2.

    Raises:
        ExportError: The maximum of an exported range is below the signature's maximum.
    """
    for spec, placeholder in _inputs(program, signature):
        for size, traced_size in zip(spec.shape, placeholder.meta["val"].shape, strict=True):
            if size not in signature.dims or not isinstance(traced_size, torch.SymInt):  # sums follow their parts
                continue
            limits, dim = bound_sympy(traced_size.node.expr, program.range_constraints), signature.dims[str(size)]
            # A model that computes the size plus one limits it to the largest int64 minus one.
            maximum = sys.maxsize - 1 if dim.max is None else dim.max
            if limits.upper < maximum:
                raise ExportError(
                    f"the exported graph supports {size} only up to {limits.upper}"
                    f" (declared: {'no maximum' if dim.max is None else f'up to {dim.max}'})",
                    location="export",
                    hint="Leave out one rule after the other to find the rule that limits the size.",
                )


def _inputs(program: ExportedProgram, signature: Signature) -> Iterator[tuple[TensorSpec, fx.Node]]:
    names = set(program.graph_signature.user_inputs)
    placeholders = [node for node in program.graph.find_nodes(op="placeholder") if node.name in names]
    return zip(signature.inputs, placeholders, strict=True)


def _lower_minima(program: ExportedProgram, signature: Signature) -> None:
    """Lowers the minimum of each dynamic axis to the declared minimum.

    For a sum of dimensions, this is the sum of their minima. ``torch.export`` assumes sizes >= 2 while it traces. Only
    declared axes are widened.
    """
    for spec, placeholder in _inputs(program, signature):
        for axis, size in enumerate(spec.shape):
            if isinstance(size, str):
                symbol = placeholder.meta["val"].shape[axis].node.expr
                if (limits := program.range_constraints.get(symbol)) is not None:
                    minimum = sum(signature.dims[name].min for name in size.split(" + "))
                    program.range_constraints[symbol] = ValueRanges(minimum, limits.upper)
