"""Traces ``float(x.max())``, ``int(mask.sum())`` and ``math.isnan(v)`` in models that branch on values.

Python's functions take and return its own numbers, which a trace does not know.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn

from optexport._utils.user_lines import is_user_code

_Symbol = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Type(type):
    """The type of a stand-in for ``int`` or ``float``, which isinstance treats as that type."""

    original: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            value = args[0].item() if isinstance(args[0], torch.Tensor) and args[0].numel() == 1 else args[0]
            if isinstance(value, _Symbol):
                if isinstance(value, torch.SymBool):
                    value = torch.sym_ite(value, 1, 0)
                return torch.sym_int(value) if cls.original is int else torch.sym_float(value)
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __eq__(cls, other: object) -> bool:
        return other is cls.original or other is cls

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


@contextlib.contextmanager
def tracing_math_of_sizes(model: nn.Module) -> Iterator[None]:
    """Makes ``math.log(x.shape[1])`` and its kind compute with tensors of float64, within the block.

    They would fix the size. Names that a model's files import from ``math`` are replaced, too.
    """
    replaced = {getattr(math, name): _of_size(getattr(math, name)) for name in _MATH_OF_SIZES}
    imported = [
        (namespace, name, value)
        for namespace in _namespaces(model)
        for name, value in namespace.items()
        if isinstance(value, BuiltinFunctionType) and value in replaced
    ]
    for namespace, name, value in imported:
        namespace[name] = replaced[value]
    try:
        functions: dict[str, Any] = {function.__name__: new for function, new in replaced.items()}
        with mock.patch.multiple(math, **functions):
            yield
    finally:
        for namespace, name, value in imported:
            namespace[name] = value


_MATH_OF_SIZES = ("sqrt", "log", "log2", "log10", "log1p", "exp", "sin", "cos", "tanh")


def uses_math(line: str) -> bool:
    """Returns True for a line that calls one of the functions that `tracing_math_of_sizes` replaces."""
    return re.search(rf"\b({'|'.join(_MATH_OF_SIZES)})\(", line) is not None


def _of_size(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(value: Any, *base: Any) -> Any:
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return function(value, *base)
        number: Any = value  # the stubs of torch.full take no symbols
        result = getattr(torch, function.__name__)(torch.full((), number, dtype=torch.float64)).item()
        return result / math.log(*base) if base else result

    return computed


@contextlib.contextmanager
def tracing_conversions(model: nn.Module) -> Iterator[None]:
    """Replaces ``int`` and ``float`` in the files of a model's modules, and functions of ``math``, within the block."""
    names = {name: _Type(name, (), {"original": getattr(builtins, name)}) for name in ("int", "float")}
    added = [(namespace, name) for namespace in _namespaces(model) for name in names if name not in namespace]
    for namespace, name in added:
        namespace[name] = names[name]
    try:
        replaced: dict[str, Any] = {name: _symbolic(getattr(math, name), function) for name, function in _MATH.items()}
        with mock.patch.multiple(math, **replaced):
            yield
    finally:
        for namespace, name in added:
            del namespace[name]


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the globals of the files that define a model's modules."""
    functions = [getattr(module.forward, "__func__", module.forward) for module in model.modules()]
    found = [
        function.__globals__
        for function in functions
        if hasattr(function, "__globals__") and is_user_code(function.__code__.co_filename)
    ]
    return list({id(namespace): namespace for namespace in found}.values())


_MATH: Mapping[str, Callable[[Any], Any]] = {
    "sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]  # its stubs lack it
    "isnan": lambda value: value != value,
    "isinf": lambda value: abs(value) == math.inf,
    "isfinite": lambda value: abs(value) < math.inf,
}


def _symbolic(function: Callable[[Any], Any], symbolic: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: (symbolic if isinstance(value, torch.SymFloat) else function)(value)
