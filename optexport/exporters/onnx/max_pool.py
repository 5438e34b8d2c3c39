"""Fixes MaxPool nodes that ONNX Runtime computes differently from torch."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir

# Operators with a finite result, except on overflow.
_FINITE = frozenset(
    {
        *("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "InstanceNormalization"),
        *("GroupNormalization", "LayerNormalization", "Relu", "Clip", "Sigmoid", "HardSigmoid", "Tanh", "Softmax"),
    }
)
# Operators with a finite result if all their inputs are finite.
_FINITE_IF_INPUTS_ARE = frozenset(
    {
        *("MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Split", "Slice", "Pad", "Transpose", "Reshape"),
        *("Unsqueeze", "Squeeze", "Flatten", "Identity", "Cast", "Add", "Sub", "Mul", "Neg", "Abs", "Resize"),
        *("LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "HardSwish", "Mish", "Softplus", "Erf"),
    }
)


def fix(model: onnx_ir.Model) -> None:
    """Makes every MaxPool compute torch's result, in place."""
    for node in list(model.graph.all_nodes()):
        if node.op_type == "MaxPool" and not node.domain:
            _name_pad_axes(node)
            if len(node.outputs) == 1 and not _is_finite(node.inputs[0]):
                _keep_minus_infinity(node)


def _name_pad_axes(node: onnx_ir.Node) -> None:
    """Adds the input of axes to a Pad before a MaxPool.

    ONNX Runtime 1.31 fuses Pad and MaxPool and then pads with minus infinity instead of zeros. It does not fuse a Pad
    that names its axes.
    """
    pad = node.inputs[0].producer() if node.inputs[0] is not None else None
    padded = pad.inputs[0] if pad is not None and pad.op_type == "Pad" and len(pad.inputs) < 4 else None
    if pad is None or padded is None or padded.shape is None:
        return
    tape = onnx_ir.tape.Tape()
    axes = tape.op("Constant", [], {"value_ints": list(range(len(padded.shape)))})
    assert pad.graph is not None
    pad.graph.insert_before(pad, list(tape.nodes))
    pad.resize_inputs(4)
    pad.replace_input_with(3, axes)


def _keep_minus_infinity(node: onnx_ir.Node) -> None:
    """Returns minus infinity for windows of minus infinity; ONNX Runtime 1.31 gives -3.4e38.

    A MaxPool with indices uses another kernel that gives minus infinity, but takes 60 times as long.
    """
    x, largest = node.inputs[0], node.outputs[0]
    if x is None or x.dtype not in (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE):
        return
    assert node.graph is not None
    tape = onnx_ir.tape.Tape()
    is_above = tape.op("Not", [tape.op("IsInf", [x], {"detect_positive": 0})])
    pooled = tape.op("MaxPool", [tape.op("Cast", [is_above], {"to": onnx_ir.DataType.FLOAT})], node.attributes)
    low = tape.op("Constant", [], {"value": onnx_ir.tensor(-math.inf, dtype=x.dtype)})
    result = tape.op("Where", [tape.op("Cast", [pooled], {"to": onnx_ir.DataType.BOOL}), largest, low])
    result.type, result.shape = largest.type, largest.shape
    users = [(user, index) for user, index in largest.uses() if user is not result.producer()]
    node.graph.insert_after(node, list(tape.nodes))
    for user, index in users:
        user.replace_input_with(index, result)
    for index, output in enumerate(node.graph.outputs):
        if output is largest:
            node.graph.outputs[index] = result


def _is_finite(value: onnx_ir.Value | None) -> bool:
    """Returns True if the operators show that a value never contains minus infinity."""
    todo, visited = [value], set[onnx_ir.Value]()
    while todo:
        value = todo.pop()
        if value is None or value in visited:
            continue
        visited.add(value)
        node = value.producer()
        if node is None or node.op_type == "Constant":
            if value.const_value is None or not _is_all_finite(value.const_value):
                return False
        elif node.domain or node.op_type not in _FINITE | _FINITE_IF_INPUTS_ARE:
            return False
        elif node.op_type in _FINITE_IF_INPUTS_ARE:
            todo += node.inputs[:1] if node.op_type in _VALUES_IN_FIRST_INPUT else node.inputs
    return True


# Only the first input holds values; the others are sizes and indices.
_VALUES_IN_FIRST_INPUT = frozenset({"Split", "Slice", "Reshape", "Unsqueeze", "Squeeze", "Resize"})


def _is_all_finite(tensor: onnx_ir.TensorProtocol) -> bool:
    numbers = tensor.numpy()
    return numbers.dtype.kind not in "fV" or bool(np.isfinite(numbers.astype(np.float64)).all())
