"""Numbers of float64 in ONNX files, which ``torch.onnx`` writes as if they were of float32.

Of ``x * 0.1`` in float64 it makes a product with 0.10000000149: a number of Python has no type, and is made float32
before it is cast. Attributes of operators, as the slope of LeakyRelu or the epsilon of LayerNormalization, are float32
in ONNX itself, and stay inexact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18

aten = torch.ops.aten


def exactly(translate: Callable[..., Any]) -> Callable[..., Any]:
    """A translation of an ATen operator that takes numbers of Python for float64 where its result is."""

    @functools.wraps(translate)
    def translated(*args: Any, **kw: Any) -> Any:
        of_tensors = (arg.dtype for arg in args if isinstance(arg, onnx_ir.Value))
        dtype = kw.get("dtype", -1)
        if (next(of_tensors, None) if dtype == -1 else dtype) == onnx_ir.DataType.DOUBLE:
            args = tuple(_constant(arg) if isinstance(arg, float) else arg for arg in args)
            kw = {key: _constant(value) if isinstance(value, float) else value for key, value in kw.items()}
        return translate(*args, **kw)

    return translated


def _constant(number: float) -> Any:
    op: Any = opset18  # whose types are those of ONNX's own values
    return op.Constant(value=onnx_ir.tensor(number, dtype=onnx_ir.DataType.DOUBLE))


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: exactly(core.aten_scalar_tensor),
    aten.full.default: exactly(core.aten_full),
    aten.full_like.default: exactly(core.aten_full_like),
    aten.new_full.default: exactly(core.aten_new_full),
    aten.fill.Scalar: exactly(core.aten_fill),
    aten.pow.Scalar: exactly(core.aten_pow_scalar),
}
