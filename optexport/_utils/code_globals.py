"""Finds the global variables and class attributes that the code of a model uses, because they may be state."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_LIBRARIES = ("torch", "transformers", "optexport")


def find_variables(model: nn.Module) -> list[tuple[Any, str]]:
    """Returns variables as pairs of a class or file and a name, which may not exist yet.

    Only code outside installed packages counts: these may initialize themselves once.
    """
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    return list(dict.fromkeys(pair for cls in classes for pair in _find_variables(cls)))


def find_cached_functions(model: nn.Module) -> list[Any]:
    """Returns the functions with ``functools.lru_cache`` that the code of a model uses."""
    values = (_plain(vars(owner).get(name)) for owner, name in find_variables(model))
    return [value for value in values if _is_cached(value)]


def is_own(cls: type | FunctionType) -> bool:
    """Returns True for a class or function outside installed packages."""
    return _is_own_file(cls.__module__ or "builtins")


def _is_own_file(module: str) -> bool:
    if module != "__main__" and module.partition(".")[0] in (*_LIBRARIES, *sys.stdlib_module_names):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


@functools.lru_cache(maxsize=4096)
def _find_variables(cls: type) -> tuple[tuple[Any, str], ...]:
    """Returns the variables that a class and the code that it calls use."""
    variables: list[tuple[Any, str]] = []
    pending: list[Any] = [cls]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen or not is_own(item):
            continue
        seen.add(id(item))
        owner = item if isinstance(item, type) else sys.modules.get(item.__module__)
        names = list(vars(item)) if isinstance(item, type) else list(dict.fromkeys(_list_names(item.__code__)))
        if owner is None:
            continue
        for place, name in [*((owner, name) for name in names), *_find_in_own_files(owner, names)]:
            value = vars(place).get(name)
            function = _unwrap(value)
            if isinstance(function, FunctionType | type):
                pending.append(function)
            if not name.startswith("__") and not isinstance(value, FunctionType | type | ModuleType):
                variables.append((place, name))
    return tuple(variables)


def _find_in_own_files(owner: type | ModuleType, names: Sequence[str]) -> Iterator[tuple[ModuleType, str]]:
    """Yields what the code may use as ``file.name``, for each file outside installed packages that it names."""
    values = (vars(owner).get(name) for name in names)
    for file in values:
        if isinstance(file, ModuleType) and _is_own_file(file.__name__):
            yield from ((file, name) for name in names if name in vars(file))


def _list_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant)


def _unwrap(value: Any) -> Any:
    """Returns the function behind a property, a method of a class, or a decorator that names it."""
    value = _plain(value)
    return inspect.unwrap(value) if isinstance(value, FunctionType) or _is_cached(value) else value


def _plain(value: Any) -> Any:
    """Returns the function of a property or of a static or class method."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _is_cached(value: Any) -> bool:
    return isinstance(value, functools._lru_cache_wrapper)
