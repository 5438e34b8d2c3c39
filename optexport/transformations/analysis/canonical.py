"""Converts any value to a text that is equal for equal values, in every process."""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from optexport._utils.tensors import bytes_of


def canonical(value: Any) -> str:
    """Returns a text that is equal only for equal values, in every process.

    ``hash`` is unsuitable: it is salted per process, and -1 and -2, or 1 and True, have the same hash.

    Raises:
        TypeError: The value cannot be reduced to parts (for example a lock or an open file).
        RecursionError: The value contains itself.
    """
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            inner = repr(value)
        case type() | torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
            inner = f"{value.__module__}.{getattr(value, '__qualname__', value)}"
        case types.FunctionType():
            inner = _function(value)
        case types.BuiltinFunctionType() if isinstance(value.__self__, types.ModuleType | None):
            inner = f"{value.__module__}.{value.__qualname__}"
        case types.BuiltinFunctionType() | types.MethodType():
            inner = f"{canonical(value.__self__)}.{value.__name__}"
        case enum.Enum():
            inner = value.name
        case torch.Tensor():
            content = bytes_of(value.cpu()).numpy().data
            inner = f"{value.dtype}{list(value.shape)}{hashlib.sha256(content).hexdigest()}"
        case Mapping():
            inner = ",".join(sorted(f"{canonical(k)}={canonical(v)}" for k, v in value.items()))
        case Set():
            inner = ",".join(sorted(map(canonical, value)))
        case Sequence():
            inner = ",".join(map(canonical, value))
        case _:
            # The parts that pickle would write: constructor, its arguments, state, items.
            parts: tuple[Any, ...] = value.__reduce_ex__(4)
            inner = canonical([list(part) if isinstance(part, Iterator) else part for part in parts])
    return f"{type(value).__module__}.{type(value).__qualname__}({inner})"


def _function(function: types.FunctionType) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if "<" not in name:
        return name
    # Lambdas and local functions may share a name, so their code distinguishes them.
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    return f"{name}{_code(function.__code__)}{canonical([function.__defaults__, function.__kwdefaults__, closed_over])}"


def _code(code: types.CodeType) -> str:
    constants = [_code(c) if isinstance(c, types.CodeType) else canonical(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}{code.co_freevars}"
