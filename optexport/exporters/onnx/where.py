"""Fixes Where nodes of types that ONNX Runtime 1.31 does not implement on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir

_CAST = (onnx_ir.DataType.INT16, onnx_ir.DataType.UINT16, onnx_ir.DataType.UINT64)


def fix(model: onnx_ir.Model) -> None:
    """Writes every choice between bools with And, Or and Not, and makes the other types int64 for it, in place."""
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Where" or node.domain:
            continue
        dtype = next(
            (v.dtype for v in (*node.inputs[1:], *node.outputs) if v is not None and v.dtype is not None), None
        )
        tape = onnx_ir.tape.Tape()
        if dtype == onnx_ir.DataType.BOOL:
            chosen = _choose_bool(tape, node.inputs)
        elif dtype in _CAST:
            condition, *operands = node.inputs
            wide = [tape.op("Cast", [value], {"to": onnx_ir.DataType.INT64}) for value in operands]
            chosen = tape.op("Cast", [tape.op("Where", [condition, *wide])], {"to": dtype})
        else:
            continue
        result = node.outputs[0]
        chosen.dtype, chosen.shape = dtype, result.shape
        assert node.graph is not None
        onnx_ir.convenience.replace_nodes_and_values(node.graph, node, [node], list(tape.nodes), [result], [chosen])


def _choose_bool(tape: onnx_ir.tape.Tape, inputs: Sequence[onnx_ir.Value | None]) -> onnx_ir.Value:
    condition, if_true, if_false = inputs
    otherwise = tape.op("And", [tape.op("Not", [condition]), if_false])
    return tape.op("Or", [tape.op("And", [condition, if_true]), otherwise])
