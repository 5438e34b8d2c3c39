"""Protects outputs and attributes from a model that writes to its own memory."""

from __future__ import annotations

import itertools
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from optexport._utils.code_globals import find_cached_functions, find_variables, is_own

_Container = dict[Any, Any] | list[Any] | deque[Any] | set[Any]


def copy_shared_outputs(model: nn.Module, outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies outputs that share memory with the model, because the next call may change them."""
    memories = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [tensor.clone() if _memory(tensor) in memories else tensor for tensor in outputs]


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor of a model, and its value at the beginning."""

    path: str
    container: _Container | tuple[Any, ...] | MappingProxyType[str, Any]
    key: Any
    tensor: torch.Tensor
    value: torch.Tensor | None  # None for a parameter, because a copy of all weights might not fit into memory
    version: int | None

    @property
    def is_written(self) -> bool:
        """True if the model wrote to the tensor, also if the value is still the same."""
        if _find(self.container, self.key) is not self.tensor or _version(self.tensor) != self.version:
            return True
        return self.value is not None and not _equal(self.tensor, self.value)

    def restore(self) -> None:
        if self.value is not None and not _equal(self.tensor, self.value):
            self.tensor.copy_(self.value)


@dataclass(frozen=True)
class _Variable:
    """A global variable or class attribute, and its value at the beginning."""

    path: str
    owner: Any
    name: str
    value: Any

    @property
    def current(self) -> Any:
        return vars(self.owner).get(self.name, _MISSING)

    def set(self, value: Any) -> None:
        if value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


_MISSING = object()


class State:
    """What a model keeps between calls, as it was at the beginning.

    That is every tensor, number and other value in the attributes of its modules, also within dicts, lists, sets,
    tuples and objects, and in the global variables and class attributes that its code uses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        seen: set[int] = set()
        containers = list(iter_containers(model, seen))
        self._variables: list[_Variable] = []
        for owner, name in find_variables(model):
            path = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
            variable = _Variable(path, owner, name, vars(owner).get(name, _MISSING))
            self._variables.append(variable)
            if type(variable.value) in _CONTAINERS or is_own(type(variable.value)):
                containers += _walk(path, variable.value, seen, hops=1)
        self._cached_functions = [(function, function.cache_info()) for function in find_cached_functions(model)]
        self._containers = [
            (path, container, container.copy()) for path, container in containers if not isinstance(container, tuple)
        ]
        # The buffers of a TorchScript program are in no dict of Python.
        scripts = [
            (path, dict(module._buffers.items()))
            for path, module in model.named_modules()
            if isinstance(module, torch.jit.ScriptModule)
        ]
        self._tensors = [
            _SavedTensor(
                _join(path, key),
                container,
                key,
                value,
                None if isinstance(value, nn.Parameter) or _has_no_data(value) else value.clone(),
                _version(value),
            )
            for path, container in [*containers, *scripts]
            for key, value in _items(container)
            if isinstance(value, torch.Tensor)
        ]
        self._tensors += [
            _SavedTensor(v.path, vars(v.owner), v.name, v.value, v.value.clone(), _version(v.value))
            for v in self._variables
            if isinstance(v.value, torch.Tensor) and not _has_no_data(v.value)
        ]

    def written_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that the model wrote to or replaced so far, by path; parameters are among them."""
        present = {
            _join(path, key): value
            for path, container in iter_containers(self._model)
            for key, value in _items(container)
        }
        return {
            saved.path: saved.tensor
            for saved in self._tensors
            if saved.is_written or present.get(saved.path, saved.tensor) is not saved.tensor
        }

    def changed_attributes(self) -> list[str]:
        """Returns the paths of other values that the model replaced, added or removed, and of lists that it changed."""
        tensors = {saved.path for saved in self._tensors}
        changed = itertools.chain.from_iterable(itertools.starmap(_changed_paths, self._containers))
        variables = (variable.path for variable in self._variables if variable.current is not variable.value)
        return [path for path in dict.fromkeys(itertools.chain(changed, variables)) if path not in tensors]

    def move_numbers(self) -> Iterator[str]:
        """Moves each Python number that the model changed by 10,000 up and down, one at a time, and yields its path."""
        for path, container, saved in self._containers:
            if isinstance(container, set):
                continue
            for key, value in _items(container):
                if type(value) in (int, float) and _find(saved, key) is not value:
                    for offset in (10_000, -10_000):
                        container[key] = value + offset
                        yield _join(path, key)
                    container[key] = value
        for variable in self._variables:
            value = variable.current
            if type(value) in (int, float) and value is not variable.value:
                for offset in (10_000, -10_000):
                    variable.set(value + offset)
                    yield variable.path
                variable.set(value)

    def restore(self) -> None:
        """Restores all values, except those of parameters that were written to in place."""
        for _, container, saved in self._containers:
            if _holds_the_same(container, saved):
                continue
            container.clear()
            container.update(saved) if isinstance(container, dict | set) else container.extend(saved)
        for variable in self._variables:
            if variable.current is not variable.value:
                variable.set(variable.value)
        for function, info in self._cached_functions:
            if function.cache_info().misses != info.misses:  # it may hold tensors of a trace
                function.cache_clear()
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.restore()


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[State]:
    """Restores at the end what a model changes in its attributes."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()


# Containers of a module that are no state, and whose names no path contains.
_INTERNAL = ("_parameters", "_buffers", "_modules")
# Hooks are no state, and most of the dicts of a module.
_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
_CONTAINERS = (dict, list, OrderedDict, defaultdict, Counter, deque, set)
_NO_STATE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.Tensor, fx.Graph, fx.Node)


def iter_containers(
    model: nn.Module, seen: set[int] | None = None
) -> Iterator[tuple[str, _Container | tuple[Any, ...]]]:
    """Yields the dicts, lists, sets and tuples that hold values of a model, with their paths.

    Args:
        seen: Collects the identities of the containers, except of tuples.
    """
    return _walk("", vars(model), set() if seen is None else seen, hops=2)


def _walk(path: str, value: Any, seen: set[int], hops: int) -> Iterator[tuple[str, _Container | tuple[Any, ...]]]:
    """Yields the dicts, lists, sets and tuples that hold values of a module, with their paths.

    Args:
        path: Path of the value, such as ``encoder.layers.0``.
        seen: Identities of the containers that were yielded.
        hops: How many objects that are no modules may lie within each other.
    """
    is_object = hasattr(value, "__dict__") and type(value) not in _CONTAINERS and not isinstance(value, _NO_STATE)
    if isinstance(value, nn.Module) or (is_object and hops):
        hops -= not isinstance(value, nn.Module)
        value = vars(value)
    if isinstance(value, tuple):
        yield path, value
        for index, item in enumerate(value):
            yield from _walk(_join(path, index), item, seen, hops)
    if type(value) not in _CONTAINERS or id(value) in seen:
        return
    seen.add(id(value))
    yield path, value
    for key, item in _items(value):
        if key not in _HOOKS:
            yield from _walk(_join(path, key), item, seen, hops)


def _join(path: str, key: Any) -> str:
    return path if key in _INTERNAL else f"{path}.{key}".removeprefix(".")


def _items(container: _Container | tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Returns the keys and values of a container; a set has no keys."""
    if isinstance(container, set):
        return []
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _find(container: _Container | tuple[Any, ...] | MappingProxyType[str, Any], key: Any) -> Any:
    """Returns a value of a container, or `_MISSING`."""
    if isinstance(container, dict | MappingProxyType):
        return container.get(key, _MISSING)
    return _MISSING if isinstance(container, set) or key >= len(container) else container[key]


def _changed_paths(path: str, container: _Container, saved: _Container) -> list[str]:
    """Returns the paths of the items that differ; that of a set, of a longer or shorter list, or of another order."""
    keys = dict.fromkeys(key for key, _ in (*_items(container), *_items(saved)))
    changed = [_join(path, key) for key in keys if _find(container, key) is not _find(saved, key)]
    if changed and not isinstance(container, dict) and len(container) != len(saved):
        return [path]
    if not changed and path and not _holds_the_same(container, saved):  # a set, or a dict in another order
        return [path]
    return changed


def _holds_the_same(container: _Container, saved: _Container) -> bool:
    """Returns True if two containers have the same objects in the same order, dicts under the same keys."""
    if isinstance(container, set):
        return container == saved
    if len(container) != len(saved) or not all(map(operator.is_, container, saved)):  # for dicts, these are the keys
        return False
    if isinstance(container, dict) and isinstance(saved, dict):
        return all(map(operator.is_, container.values(), saved.values()))
    return True


def _version(tensor: torch.Tensor) -> int | None:
    """Returns the number of writes to a tensor; None for a tensor of inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version


def _has_no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided:  # torch.equal supports only strided tensors
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())  # a constant may contain NaN


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # a subclass that represents a weight has separate memory
        return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
