"""Traces models that keep results by size: ``if (height, width) not in self.cache``.

A symbolic size has no hash, because the trace does not know to which other sizes it is equal.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from optexport._utils.code_globals import find_variables
from optexport._utils.module_state import iter_containers

# torch's message for a symbolic size as a key of a dict.
UNHASHABLE = "unhashable type: non-nested SymInt"
_ENABLED: ContextVar[bool] = ContextVar("size_keys", default=False)


@contextlib.contextmanager
def allowing_size_keys() -> Iterator[None]:
    """Makes `replacing_dicts` replace dicts within the block."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def allows_size_keys() -> bool:
    """Returns True within `allowing_size_keys`."""
    return _ENABLED.get()


@contextlib.contextmanager
def replacing_dicts(model: nn.Module) -> Iterator[None]:
    """Replaces a model's dicts by copies that accept symbolic sizes as keys, within the block.

    These are attributes of its modules and classes, and global variables. Nothing is replaced outside
    `allowing_size_keys`.
    """
    replaced: list[tuple[Any, str, dict[Any, Any]]] = []
    copies: dict[int, SizeKeyDict] = {}
    for owner, name, value in _find_dicts(model) if _ENABLED.get() else ():
        copy = copies.setdefault(id(value), SizeKeyDict(value))
        replaced.append((owner, name, value))
        _set(owner, name, copy)
    try:
        yield
    finally:
        for owner, name, value in replaced:
            _set(owner, name, value)


class SizeKeyDict(OrderedDict[Any, Any]):
    """Compares symbolic sizes in keys with all other keys; each comparison is a condition of the trace."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._find(key))

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._find(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._find(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._find(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._find(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._find(key), *default)

    def move_to_end(self, key: Any, last: bool = True) -> None:
        super().move_to_end(self._find(key), last)

    def _find(self, key: Any) -> Any:
        """Returns the equal key that the dict has, or one that can be stored."""
        if isinstance(key, _Key):
            return key
        is_symbolic = _is_symbolic(key)
        for other in tuple(self):
            sizes = other.sizes if isinstance(other, _Key) else other
            if (is_symbolic or isinstance(other, _Key)) and _are_equal(sizes, key):
                return other
        return _Key(key) if is_symbolic else key


class _Key:
    """Wraps a key with symbolic sizes; equal only to itself."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def __repr__(self) -> str:
        return repr(self.sizes)


def _is_symbolic(key: Any) -> bool:
    return isinstance(key, torch.SymInt) or (isinstance(key, tuple) and any(map(_is_symbolic, key)))


def _are_equal(a: Any, b: Any) -> bool:
    """Compares two keys; only numbers may be equal to a symbolic size."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return all(isinstance(size, int | float | torch.SymInt) for size in (a, b)) and bool(a == b)
    return bool(a == b)


def _find_dicts(model: nn.Module) -> Iterator[tuple[Any, str, dict[Any, Any]]]:
    """Yields dicts with the class, file or container that they are in, and their name in it."""
    variables = [(owner, name, vars(owner).get(name)) for owner, name in find_variables(model)]
    yield from ((owner, name, value) for owner, name, value in variables if type(value) in (dict, OrderedDict))
    internal = vars(nn.Module())
    for _, container in list(iter_containers(model)):
        for name, value in list(container.items()) if isinstance(container, dict) else ():
            if name not in internal and type(value) in (dict, OrderedDict):
                yield container, name, value


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
