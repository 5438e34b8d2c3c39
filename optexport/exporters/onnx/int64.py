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
        build = None if node.domain else _BUILT.get(node.op_type)
        if build is None or node.inputs[0] is None or node.inputs[0].dtype != onnx_ir.DataType.INT64:
            continue
        assert node.graph is not None
        tape, result = onnx_ir.tape.Tape(), node.outputs[0]
        built = build(tape, node)
        if built is None or not tape.nodes:
            continue
        built.dtype, built.shape = onnx_ir.DataType.INT64, result.shape
        onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], [*tape.nodes], [result], [built])


def _picked(operator: str, tape: onnx_ir.tape.Tape, x: Any, y: Any) -> Any:
    """Selects x or y by a comparison of the two; returns x if y is missing."""
    return x if y is None else tape.op("Where", [tape.op(operator, [x, y]), x, y])


def _of_all(operator: str, tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    return reduce(partial(_picked, operator, tape), node.inputs)


def _clip(tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    x, low, high = [*node.inputs, None, None][:3]
    return _picked("Less", tape, _picked("Greater", tape, x, low), high)


def _relu(tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    return _picked("Greater", tape, node.inputs[0], _zero(tape))


def _sign(tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
    sides = [tape.op(operator, [node.inputs[0], _zero(tape)]) for operator in ("Greater", "Less")]
    return tape.op("Sub", [tape.op("Cast", [side], {"to": onnx_ir.DataType.INT64}) for side in sides])


def _zero(tape: onnx_ir.tape.Tape) -> Any:
    return tape.op("Constant", [], {"value_int": 0})


def _along_axes(operator: str, tape: onnx_ir.tape.Tape, node: onnx_ir.Node) -> Any:
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
    x, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if given is not None:
        found = None if given.const_value is None else [int(axis) for axis in given.const_value.numpy().reshape(-1)]
    else:
        found = [*node.attributes.get_ints("axes", [])]
    is_noop: int = node.attributes.get_int("noop_with_empty_axes", 0)
    if found or found is None or is_noop:
        return found
    return None if x is None or x.shape is None else list(range(len(x.shape)))


_BUILT: Mapping[str, _Build] = {
    "Max": partial(_of_all, "Greater"),
    "Min": partial(_of_all, "Less"),
    "Clip": _clip,
    "Relu": _relu,
    "Sign": _sign,
    "ReduceMax": partial(_along_axes, "ArgMax"),
    "ReduceMin": partial(_along_axes, "ArgMin"),
}
