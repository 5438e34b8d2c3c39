"""Translations of ATen operators that ``torch.onnx`` converts inexactly or wrongly.

ONNX stores operator attributes as float32, for example LeakyRelu's slope and LayerNormalization's epsilon. They stay
inexact in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18

aten = torch.ops.aten
op: Any = opset18  # Any, because its functions also accept onnx_ir values


def keep_float64(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a translation so that Python floats become float64 if the result is float64.

    ``torch.onnx`` converts ``x * 0.1`` in float64 to a product with 0.10000000149. A Python float has no dtype, and
    becomes float32 before it is cast.
    """

    @functools.wraps(translate)
    def translated(*args: Any, **kw: Any) -> Any:
        of_tensors = (arg.dtype for arg in args if isinstance(arg, onnx_ir.Value))
        dtype = kw.get("dtype", -1)
        if (next(of_tensors, None) if dtype == -1 else dtype) == onnx_ir.DataType.DOUBLE:
            args = tuple(_constant(arg, onnx_ir.DataType.DOUBLE) if isinstance(arg, float) else arg for arg in args)
        return translate(*args, **kw)

    return translated


def cast_to_int64(index: Any) -> Any:
    """Casts an int32 index to int64, as ONNX requires; returns anything else unchanged."""
    if index is None or index.dtype != onnx_ir.DataType.INT32:
        return index
    cast = op.Cast(index, to=onnx_ir.DataType.INT64)
    cast.shape = index.shape
    return cast


def _constant(number: float, dtype: onnx_ir.DataType) -> Any:
    return op.Constant(value=onnx_ir.tensor(number, dtype=dtype))


def _atan2(y: Any, x: Any) -> Any:
    """Computes the angle of a point. The sign of a zero counts.

    For y = 0 and negative x, ``torch.onnx`` gives -π instead of π.
    """
    zero, one, pi = (_constant(number, y.dtype) for number in (0.0, 1.0, math.pi))
    is_below, is_left = (op.Or(op.Less(v, zero), op.Less(op.Div(one, v), zero)) for v in (y, x))
    is_nowhere = op.And(op.Equal(y, zero), op.Equal(x, zero))
    angle = op.Where(is_nowhere, y, op.Atan(op.Div(y, x)))
    return op.Where(is_left, op.Where(is_below, op.Sub(angle, pi), op.Add(angle, pi)), angle)


def _log(base: float) -> Callable[[Any], Any]:
    """Returns the translation of a logarithm to a base.

    ``torch.onnx`` divides by a logarithm in float32, so ``floor(log2(n))`` of a size is too small at powers of two.
    In float64, in which sizes are computed, powers of the base have exact logarithms, as in torch.
    """

    def translated(x: Any) -> Any:
        result = op.Div(op.Log(x), _constant(math.log(base), x.dtype))
        if x.dtype != onnx_ir.DataType.DOUBLE:
            return result
        whole = op.Round(result)
        return op.Where(op.Equal(op.Pow(_constant(base, x.dtype), whole), x), whole, result)

    return translated


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Gathers the elements of a diagonal.

    ``torch.onnx`` multiplies all other elements by 0 and sums, which gives NaN if an element is infinite.
    """
    axes = list(range(len(x.shape)))
    last = [axes[dim1], axes[dim2]]
    x = op.Transpose(x, perm=[axis for axis in axes if axis not in last] + last)
    rows, columns = op.Shape(x, start=-2, end=-1), op.Shape(x, start=-1)
    zero, one, above, below = (op.Constant(value_ints=[n]) for n in (0, 1, max(offset, 0), max(-offset, 0)))
    length = op.Max(op.Min(op.Sub(rows, below), op.Sub(columns, above)), zero)
    steps = op.Range(*(op.Squeeze(n) for n in (zero, length, one)))
    places = op.Add(op.Mul(steps, op.Add(columns, one)), op.Add(op.Mul(below, columns), above))
    sizes = op.Concat(op.Shape(x, end=-2), op.Mul(rows, columns), axis=0)
    return op.Gather(op.Reshape(x, sizes, allowzero=1), places, axis=-1)


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: keep_float64(core.aten_scalar_tensor),
    aten.full.default: keep_float64(core.aten_full),
    aten.full_like.default: keep_float64(core.aten_full_like),
    aten.pow.Scalar: keep_float64(core.aten_pow_scalar),
    aten.new_full.default: keep_float64(core.aten_new_full),
    aten.fill.Scalar: keep_float64(core.aten_fill),
    aten.atan2.default: _atan2,
    aten.diagonal.default: _diagonal,
    aten.log2.default: _log(2.0),
    aten.log10.default: _log(10.0),
}
