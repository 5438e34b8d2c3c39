"""Arithmetic that ``torch.onnx`` rounds differently, or for which it finds no overload."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:  # noqa: A002 - names of the operator
    """Clamps by bounds of one type; ``torch.onnx`` finds no overload for a whole number and a fraction."""
    return torch.clamp(x, *_of_one_type(min, max))


def _of_one_type(*bounds: Any) -> tuple[Any, ...]:
    return tuple(None if bound is None else float(bound) for bound in bounds) if _has_float(*bounds) else bounds


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes the logarithm of a sigmoid.

    ``torch.onnx`` gives minus infinity below -100, because its sigmoid is 0 there.
    """
    return -functional.softplus(-x)


def logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the logarithm of a sum of exponentials, which overflows in ``torch.onnx``."""
    result = torch.maximum(x, y) + functional.softplus(-(x - y).abs())
    return torch.where(x == y, x + math.log(2), result)  # the difference of two infinities is NaN


def logaddexp2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes `logaddexp` to base 2."""
    return logaddexp(x * math.log(2), y * math.log(2)) / math.log(2)


def rrelu(x: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any) -> torch.Tensor:
    """Computes ``torch.rrelu`` in eval mode, where the slope is the mean of the bounds."""
    return functional.leaky_relu(x, (lower + upper) / 2)


def fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the larger number, ignoring NaN."""
    return _ignore_nan(torch.maximum, x, y)


def fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the smaller number, ignoring NaN."""
    return _ignore_nan(torch.minimum, x, y)


def _ignore_nan(extreme: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = _promote(x, y)
    if not x.is_floating_point():  # ONNX Runtime has no Max of small integers
        return extreme(x.long(), y.long()).to(x.dtype)  # type: ignore[no-any-return]
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, extreme(x, y)))


def hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the length of a hypotenuse; the squares of large numbers would overflow."""
    largest = torch.maximum(x.abs(), y.abs())
    divisor = torch.where((largest > 0) & (largest < math.inf), largest, torch.ones((), dtype=largest.dtype))
    return torch.where(divisor == largest, largest * ((x / divisor).square() + (y / divisor).square()).sqrt(), largest)


def copysign(x: torch.Tensor, y: Any) -> torch.Tensor:
    """Gives numbers the signs of others; a zero may be negative."""
    x, y = _promote(x, y)
    if not x.is_floating_point():
        x, y = x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype())
    return torch.where((y < 0) | (1 / y < 0), -x.abs(), x.abs())


def divide(x: torch.Tensor, y: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """Divides, with torch's rounding.

    For floats rounded down, torch gives -11 for -7 / 0.7, although the quotient in floats is -10. ``torch.onnx``
    divides integers in float32, so that 1,699,999,199 // 3,600 is too large by one.
    """
    is_fraction = _has_float(x, y)
    if rounding_mode is None or (is_fraction and rounding_mode != "floor"):
        return torch.div(x, y, rounding_mode=rounding_mode)
    x, y = _promote(x, y)
    if not is_fraction:
        dtype, x, y = x.dtype, x.long(), y.long()  # ONNX Runtime does not divide smaller integers
        quotient: torch.Tensor = aten.floor_divide.default(x, y)
        if rounding_mode == "trunc":
            quotient = quotient + ((torch.remainder(x, y) != 0) & ((x < 0) != (y < 0))).long()
        return quotient.to(dtype)
    rest = torch.fmod(x, y)
    quotient = (x - rest) / y - ((rest != 0) & ((rest < 0) != (y < 0))).to(x.dtype)
    return torch.where(y == 0, x / y, torch.round(quotient))


def remainder(x: Any, y: Any) -> torch.Tensor:
    """Computes the remainder of a division that rounds down, exactly for floats.

    ``torch.onnx`` subtracts a rounded product, so that 60,000 % 6.2831855 has an error of 0.003.
    """
    is_fraction = _has_float(x, y)
    x, y = _promote(x, y)
    if not is_fraction:
        return torch.remainder(x, y)
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def truncated_remainder(x: Any, y: Any) -> torch.Tensor:
    """Computes the remainder of a division that rounds toward zero.

    ONNX Runtime computes it in float64 for integers.
    """
    if _has_float(x, y):
        return aten.fmod.Tensor(*_promote(x, y))  # type: ignore[no-any-return]
    x, y = _promote(x, y)
    quotient = divide(x, y, rounding_mode="trunc")
    return torch.sub(x, quotient * y)


def round_floats(operator: Any, x: torch.Tensor) -> torch.Tensor:
    """Applies a rounding operator to floats and copies integers.

    ONNX has no rounding operators for integers.
    """
    return operator(x) if x.is_floating_point() else x.clone()


def _has_float(*operands: Any) -> bool:
    return any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in operands)


def _promote(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts two operands, tensors or numbers, to tensors of the result's dtype."""
    dtype = torch.result_type(x, y)
    first, second = (v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=dtype) for v in (x, y))
    return first.to(dtype), second.to(dtype)
