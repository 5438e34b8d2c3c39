"""Writes a linear whose result is only cut into columns as one linear for each part.

ONNX Runtime 1.31 cuts by a Split, which copies the whole result.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import onnx_ir
import onnxscript.optimizer
from onnx_ir.convenience import get_const_tensor, replace_nodes_and_values


class _Constant(NamedTuple):
    """A weight or a bias; a linear may multiply by the transpose of the stored value."""

    value: onnx_ir.Value
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as the linear uses it."""
        assert self.value.const_value is not None
        shape = tuple(self.value.const_value.shape.numpy())
        return shape[::-1] if self.is_transposed else shape


class _CutLinear(NamedTuple):
    """A linear whose result is only cut.

    Attributes:
        nodes: The MatMul, and the Add of a bias.
        cuts: The nodes that cut the result; for each output, the first column and the end.
    """

    nodes: tuple[onnx_ir.Node, ...]
    weight: _Constant
    bias: _Constant | None
    cuts: dict[onnx_ir.Node, list[tuple[int, int]]]


def split_linears(model: onnx_ir.Model) -> onnx_ir.Model:
    """Replaces, in place, every linear whose result is only cut by one linear for each part."""
    for node in list(model.graph):
        linear = _find_cut_linear(node)
        if linear is None:
            continue
        for cut, ranges in linear.cuts.items():
            tape = onnx_ir.tape.Tape()
            parts = [_write_part(linear, columns, tape) for columns in ranges]
            for part, output in zip(parts, cut.outputs, strict=True):
                part.shape, part.type = output.shape, output.type
            replace_nodes_and_values(model.graph, cut, [cut], tape.nodes, cut.outputs, parts)
        model.graph.remove(reversed(linear.nodes), safe=True)
    onnxscript.optimizer.remove_unused_nodes(model)
    return model


def _write_part(linear: _CutLinear, columns: tuple[int, int], tape: onnx_ir.tape.Tape) -> onnx_ir.Value:
    part = tape.op("MatMul", [linear.nodes[0].inputs[0], _take_columns(linear.weight, columns, tape)])
    return part if linear.bias is None else tape.op("Add", [part, _take_columns(linear.bias, columns, tape)])


def _find_cut_linear(node: onnx_ir.Node) -> _CutLinear | None:
    weight = _as_constant(node.inputs[1]) if node.op_type == "MatMul" and node.domain == "" else None
    if weight is None or len(weight.shape) != 2:
        return None
    result, bias = node.outputs[0], None
    nodes: tuple[onnx_ir.Node, ...] = (node,)
    users = result.consumers()
    if len(users) == 1 and users[0].op_type == "Add" and not result.is_graph_output():
        bias = next((constant for value in users[0].inputs if (constant := _as_constant(value)) is not None), None)
        if bias is None or bias.is_transposed or bias.shape != weight.shape[1:]:
            return None
        result, nodes = users[0].outputs[0], (node, users[0])
    cuts = {user: _find_ranges(user, weight.shape[1]) for user in result.consumers()}
    if result.is_graph_output() or not all(cuts.values()) or sum(map(len, cuts.values())) < 2:
        return None
    return _CutLinear(nodes, weight, bias, cuts)


def _find_ranges(node: onnx_ir.Node, width: int) -> list[tuple[int, int]]:
    """Returns the first column and the end of each output of a Slice or Split; empty for any other node."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    constants = [None if value is None else get_const_tensor(value) for value in node.inputs[1:]]
    if node.domain or shape is None or None in constants:
        return []
    numbers = [tensor.numpy().reshape(-1).tolist() for tensor in constants if tensor is not None]
    last = len(shape) - 1
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) in (-1, last):
        count = len(node.outputs)
        sizes = numbers[0] if numbers else [-(-width // count)] * count  # the last part may be smaller
        ends = [min(end, width) for end in itertools.accumulate(sizes)]
        return list(zip([0, *ends], ends, strict=False))
    if node.op_type == "Slice" and numbers[2:] in ([[last]], [[-1]], [[last], [1]], [[-1], [1]]):
        start, end, _ = slice(*numbers[0], *numbers[1]).indices(width)
        return [(start, end)] if start < end else []
    return []


def _as_constant(value: onnx_ir.Value | None) -> _Constant | None:
    node = value.producer() if value is not None else None
    is_transposed = node is not None and node.op_type == "Transpose" and node.attributes.get_ints("perm") == (1, 0)
    source = node.inputs[0] if node is not None and is_transposed else value
    return None if source is None or source.const_value is None else _Constant(source, is_transposed)


def _take_columns(constant: _Constant, columns: tuple[int, int], tape: onnx_ir.tape.Tape) -> onnx_ir.Value:
    """Returns some columns of a weight, or elements of a bias; linears that share a constant share its parts."""
    value, graph = constant.value, constant.value.graph
    assert graph is not None
    assert value.const_value is not None
    # A weight that another linear uses transposed has other parts there.
    name = f"{value.name}[{'' if constant.is_transposed else '..., '}{columns[0]}:{columns[1]}]"
    if name not in graph.initializers:
        array = value.const_value.numpy()
        part = array[slice(*columns)] if constant.is_transposed else array[..., slice(*columns)]
        tensor = onnx_ir.tensor(np.ascontiguousarray(part), name=name)
        graph.register_initializer(onnx_ir.val(name, const_value=tensor))
    part_value = graph.initializers[name]
    return tape.op("Transpose", [part_value], {"perm": (1, 0)}) if constant.is_transposed else part_value
