"""Fixes int64 operators that ONNX Runtime computes wrongly, such as Max.

The CPU kernels of version 1.31 compare the two halves of a number separately, and treat the lower half as signed. They
return 5 as the larger of 3,000,000,000 and 5, and may confuse timestamps in milliseconds. Less, Greater and ArgMax are
correct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import onnx_ir

_Build = Callable[[onnx_ir.tape.Tape, onnx_ir.Node], Any]


def fix(model: onnx_ir.Model) -> None:
    """Replaces int64 operators by others that compute torch's results, in place.

    They are Max, Min, Clip, Sign, ReduceMax and ReduceMin. Relu is replaced too, because ONNX Runtime lacks it for
    int64.
    """
    for node in list(model.graph.all_nodes()):
        build = None if node.domain else _BUILDERS.get(node.op_type)
        if build is None or node.inputs[0] is None or node.inputs[0].dtype != onnx_ir.DataType.INT64:
            continue
        assert node.graph is not None
        tape, result = onnx_ir.tape.Tape(), node.outputs[0]
        result_value = build(tape, node)
        if result_value is None or not tape.nodes:
            continue
        result_value.dtype, result_value.shape = onnx_ir.DataType.INT64, result.shape
        onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], [*tape.nodes], [result], [result_value])


def _select(operator: str, tape: onnx_ir.tape.Tape, x: Any, y: Any) -> Any:
    """Selects x or y by a comparison of the two; returns x if y is missing."""
    return x if y is None else tape.op("Where", [tape.op(operator, [x, y]), x, y])


def _select_all(operator: str, tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    return reduce(partial(_select, operator, tape), node.inputs)


def _clip(tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    x, low, high = [*node.inputs, None, None][:3]
    return _select("Less", tape, _select("Greater", tape, x, low), high)


def _relu(tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    return _select("Greater", tape, node.inputs[0], _zero(tape))


def _sign(tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    sides = [tape.op(operator, [node.inputs[0], _zero(tape)]) for operator in ("Greater", "Less")]
    return tape.op("Sub", [tape.op("Cast", [side], {"to": onnx_ir.DataType.INT64}) for side in sides])


def _zero(tape: onnx_ir.tape.Tape) -> Any:
    return tape.op("Constant", [], {"value_int": 0})


def _gather_extreme(operator: str, tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    """Gathers by ArgMax or ArgMin along each axis; returns None if the axes are unknown."""
    x, axes = node.inputs[0], _axes(node)
    if axes is None:
        return None
    for axis in axes:
        x = tape.op("GatherElements", [x, tape.op(operator, [x], {"axis": axis, "keepdims": 1})], {"axis": axis})
    if axes and not node.attributes.get_int("keepdims", 1):
        x = tape.op("Squeeze", [x, tape.op("Constant", [], {"value_ints": axes})])
    return x


def _axes(node: onnx_ir.Node) -> list[int] | None:
    x, operand = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if operand is not None:
        axes = None if operand.const_value is None else [int(axis) for axis in operand.const_value.numpy().reshape(-1)]
    else:
        axes = [*node.attributes.get_ints("axes", [])]
    is_noop: int = node.attributes.get_int("noop_with_empty_axes", 0)
    if axes or axes is None or is_noop:
        return axes
    return None if x is None or x.shape is None else list(range(len(x.shape)))


_BUILDERS: Mapping[str, _Build] = {
    "Max": partial(_select_all, "Greater"),
    "Min": partial(_select_all, "Less"),
    "Clip": _clip,
    "Relu": _relu,
    "Sign": _sign,
    "ReduceMax": partial(_gather_extreme, "ArgMax"),
    "ReduceMin": partial(_gather_extreme, "ArgMin"),
}
