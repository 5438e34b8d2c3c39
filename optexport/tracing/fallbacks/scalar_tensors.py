"""Tracks sizes that a model computes in tensors, while the model is traced.

``torch.div(x.shape[1], 2, rounding_mode="trunc")`` is a tensor, and so is a result that depends on a stride in a
buffer. ``torch.export`` treats every number that is read from a tensor as unknown, and stops if a size depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from optexport._utils.writes import overwritten
from optexport.signature.index_values import is_whole

Integer = int | torch.SymInt


@dataclass(frozen=True)
class _Ratio:
    """A fraction, with which a divided and rounded size stays an expression of integers."""

    numerator: Integer
    denominator: int = 1

    def plus(self, addend: _Ratio) -> _Ratio | None:
        if not (self.denominator == 1 or addend.denominator == 1 or (self.is_exact() and addend.is_exact())):
            return None
        return _Ratio(
            self.numerator * addend.denominator + addend.numerator * self.denominator,
            self.denominator * addend.denominator,
        )

    def times(self, factor: _Ratio) -> _Ratio | None:
        if not (self.is_exact() and factor.is_exact()):
            return None
        return _Ratio(self.numerator * factor.numerator, self.denominator * factor.denominator)

    def divided_by(self, number: int) -> _Ratio:
        return _Ratio(self.numerator, self.denominator * number)

    def is_exact(self) -> bool:
        """Returns True if a float represents the fraction exactly; 41 * (3 / 41) may be below 3."""
        return self.denominator & (self.denominator - 1) == 0

    def negative(self) -> _Ratio:
        return _Ratio(-self.numerator, self.denominator)

    def floor(self) -> _Ratio:
        return _Ratio(self.numerator // self.denominator)

    def ceil(self) -> _Ratio:
        return _Ratio(-(-self.numerator // self.denominator))

    def trunc(self) -> _Ratio | None:
        return self.floor() if statically_known_true(self.numerator >= 0) else None

    def as_integer(self) -> _Ratio | None:
        return self if self.denominator == 1 else None


def _divided(a: _Ratio, b: _Ratio, rounding_mode: str | None = None) -> _Ratio | None:
    if not isinstance(b.numerator, int) or b.numerator <= 0 or b.denominator != 1:
        return None
    ratio = a.divided_by(b.numerator)
    if rounding_mode is None:
        return ratio
    return ratio.floor() if rounding_mode == "floor" else ratio.trunc()


def _subtracted(a: _Ratio, b: _Ratio) -> _Ratio | None:
    return a.plus(b.negative())


def _reversed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(b, a)


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[_Ratio, _Ratio], _Ratio]:
    return lambda a, b: _Ratio(compare(a.numerator * b.denominator, b.numerator * a.denominator))


def _extreme(pick: Callable[[Any, Any], Any]) -> Callable[[_Ratio, _Ratio], _Ratio]:
    return lambda a, b: _Ratio(
        pick(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator
    )


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# Other dtypes would truncate or round sizes.
_EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
_COMPARED = (torch.bool,)
# Functions and methods of torch, by name, whose results are tracked.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{spelt: _compared(getattr(operator, name)) for name in _COMPARISONS for spelt in (name, f"__{name}__")},
    **dict.fromkeys(("add", "__add__", "__radd__"), _Ratio.plus),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _subtracted),
    **dict.fromkeys(("rsub", "__rsub__"), _reversed(_subtracted)),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _Ratio.times),
    **dict.fromkeys(("div", "divide", "true_divide", "__div__", "__truediv__"), _divided),
    **dict.fromkeys(("__rdiv__", "__rtruediv__"), _reversed(_divided)),
    **dict.fromkeys(("floor_divide", "__floordiv__"), lambda a, b: _divided(a, b, "floor")),
    "__rfloordiv__": lambda a, b: _divided(b, a, "floor"),
    **dict.fromkeys(("neg", "__neg__"), _Ratio.negative),
    "maximum": _extreme(torch.sym_max),
    "minimum": _extreme(torch.sym_min),
    "ceil": _Ratio.ceil,
    "floor": _Ratio.floor,
    **dict.fromkeys(("int", "long", "tensor", "as_tensor", "scalar_tensor", "clone", "detach"), _Ratio.as_integer),
}
_READING = ("item", "__int__", "__index__", "__bool__")
# Functions that accept a tensor with one element where they expect an integer.
_SIZED = ("view", "reshape", "expand", "repeat", "pad", "narrow", "as_strided", "new_zeros", "new_ones", "arange")


class ScalarTracker(TorchFunctionMode):
    """Replaces numbers that are read from tensors by expressions of sizes and constants.

    Constants are Python numbers and integer buffers without dimensions.

    Args:
        changing: Buffers whose values change between calls.

    Attributes:
        used_buffers: Buffers whose values were used.
    """

    def __init__(self, model: nn.Module, changing: Collection[str] = ()) -> None:
        super().__init__()
        self.used_buffers: set[str] = set()
        self._values = WeakTensorKeyDictionary()
        self._buffers = [
            (f"{path}.{name}".lstrip("."), module, name, int(buffer))
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if f"{path}.{name}".lstrip(".") not in changing
            and buffer.dim() == 0
            and is_whole(buffer)
            and not buffer.is_meta
        ]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READING and args and (value := self._find_value(args[0])) is not None and value.denominator == 1:
            return bool(value.numerator) if name == "__bool__" else value.numerator
        if name in _SIZED:
            own = args[: name != "arange"]  # the tensor that is reshaped, which may be a known number itself
            args = (*own, *map(self._as_size, args[len(own) :]))
            kwargs = {key: self._as_size(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        for tensor in overwritten(func, args, kwargs):
            self._values[tensor] = (None, tensor._version)
        if isinstance(result, torch.Tensor) and result.dim() == 0 and all(result is not arg for arg in args):
            # Unknown results are stored as well: a model may assign one to the attribute of a known number.
            self._values[result] = (self._compute(name, args, kwargs, result.dtype), result._version)
        return result

    def _compute(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> _Ratio | None:
        """Returns the value of a function's result; None if it depends on anything unknown."""
        if dtype not in (_COMPARED if name.strip("_") in _COMPARISONS else _EXACT):
            return None
        if name == "to":
            value = self._find_value(args[0])
            return None if value is None else value.as_integer()
        if name not in _ARITHMETIC or not set(kwargs) <= {"rounding_mode", "dtype", "device"}:
            return None
        if any(isinstance(arg, torch.Tensor) and arg.dtype == torch.bool for arg in args):
            return None
        operands = [self._find_value(arg) for arg in args]
        if None in operands:
            return None
        options = {key: value for key, value in kwargs.items() if key == "rounding_mode"}
        return _ARITHMETIC[name](*operands, **options)  # type: ignore[no-any-return]

    def _find_value(self, value: Any) -> _Ratio | None:
        if isinstance(value, int | torch.SymInt):
            return _Ratio(value)
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            return None
        ratio, version = self._values.get(value) or (self._find_buffer_value(value), 0)
        return ratio if version == value._version else None  # the tensor may have been changed in place

    def _find_buffer_value(self, buffer: torch.Tensor) -> _Ratio | None:
        for path, module, name, number in self._buffers:
            if getattr(module, name) is buffer:
                self.used_buffers.add(path)
                return _Ratio(number)
        return None

    def _as_size(self, value: Any) -> Any:
        """Returns an argument, with numbers in place of known tensors."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._as_size, value))
        ratio = self._find_value(value) if isinstance(value, torch.Tensor) and is_whole(value) else None
        return value if ratio is None else ratio.numerator
