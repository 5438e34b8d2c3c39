"""Digests of tensors, graphs and files, for cache keys."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from optexport._utils.tensors import bytes_of
from optexport.bundle.digests import sha256
from optexport.cache.imported_modules import is_installed
from optexport.exporters import registry

# Packages with functions and modules that are identified by name, given the versions of the packages.
_OPERATOR_PACKAGES = ("torch", "_operator", "operator", "math", "builtins", "optexport")
_PLAIN = (
    int,
    float,
    complex,
    str,
    bool,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def of_tensors(groups: Iterable[Mapping[str, torch.Tensor]]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for group in groups:
        for name, tensor in group.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def of_file(path: Path, file_format: str) -> str:
    """Returns the SHA-256 of a model's files, such as external ONNX weights, and of its runtime's own packages."""
    chosen = registry.get_format(file_format)
    digests = [*map(sha256, chosen.existing_files(path)), *map(str, chosen.versions().items())]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def of_object(value: object) -> str | None:
    """Returns the SHA-256 of an object with everything in it, such as a model.

    Classes and functions count by name, and tensors by type, layout and bytes. The result is None if the object cannot
    be pickled, or if something in it is not identified this way: a class or function outside installed packages, or a
    graph, whose code may call such functions.
    """
    stream = _Stream()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except Exception:  # the object's own code may raise anything
        return None
    return stream.digest.hexdigest()


class _Stream:
    """A file that keeps only the digest of its bytes."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: _Stream, protocol: int) -> None:
        super().__init__(stream, protocol)
        # Numbers of memory by address. The memory is referenced, so that no other tensor gets its address.
        self._memory: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def persistent_id(self, value: object) -> object:
        """Returns what stands for a tensor or a set in the digest; None for all other objects."""
        if isinstance(value, fx.GraphModule):
            raise _UnknownError
        if isinstance(value, type | FunctionType) and not is_installed(value.__module__):
            raise _UnknownError
        if isinstance(value, MethodType) and not _is_of_class(value):
            raise _UnknownError
        if isinstance(value, set | frozenset):  # the order of texts in a set differs between processes
            return type(value).__name__, sorted(map(_leaf, value))
        return self._of_tensor(value) if isinstance(value, torch.Tensor) else None

    def _of_tensor(self, tensor: torch.Tensor) -> object:
        storage = tensor.untyped_storage()
        number, _ = self._memory.setdefault(storage.data_ptr(), (len(self._memory), storage))
        kind = (_identify(type(tensor)), str(tensor.dtype), str(tensor.device), tensor.requires_grad)
        layout = (number, tensor.storage_offset(), *tensor.shape, *tensor.stride())
        attributes = [(name, _leaf(item)) for name, item in vars(tensor).items()]
        return kind, layout, attributes, hashlib.sha256(_bytes(tensor)).hexdigest()


def of_graph(graph_module: fx.GraphModule) -> str | None:
    """Returns the SHA-256 of a graph and its weights, or None if a function is unknown.

    A function is unknown if its name does not identify it, for example one of a plugin. The digest includes the source
    location of nodes, because exporters write it into their files.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(graph_module):
            digest.update(part if isinstance(part, memoryview) else repr(part).encode())
    except _UnknownError:
        return None
    return digest.hexdigest()


def _is_of_class(method: MethodType) -> bool:
    """Returns True if a class has a method; pickle would only name one that was set on an object."""
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    own = getattr(owner, method.__name__, None)
    return getattr(own, "__func__", own) is method.__func__


class _UnknownError(Exception):
    """An object that its name does not identify."""


def _parts(graph_module: fx.GraphModule) -> Iterator[object]:
    names_by_memory: dict[tuple[int, ...], str] = {}
    for node in graph_module.graph.nodes:
        yield node.op, node.name, [_leaf(leaf) for leaf in tree_leaves((node.args, node.kwargs))]
        yield str(node.args), str(node.kwargs), [str(node.meta.get(key)) for key in ("nn_module_stack", "stack_trace")]
        match node.op:
            case "call_function":
                yield _identify(node.target)
            case "call_module":
                module = graph_module.get_submodule(str(node.target))
                if isinstance(module, fx.GraphModule):
                    yield from _parts(module)
                else:
                    yield from _of_module(str(node.target), module, names_by_memory)
            case "get_attr":
                yield from _of_attribute(str(node.target), _attribute(graph_module, str(node.target)), names_by_memory)
            case _:
                yield node.target


def _of_module(target: str, module: nn.Module, names_by_memory: dict[tuple[int, ...], str]) -> Iterator[object]:
    for name, part in module.named_modules(prefix=target):
        hooks = (part._forward_hooks, part._forward_pre_hooks)
        if not type(part).__module__.startswith("torch.nn.modules.") or any(hooks):
            raise _UnknownError
        yield name, _identify(type(part))
        for key, value in sorted(vars(part).items()):
            if not key.startswith("_"):
                yield key, [_leaf(leaf) for leaf in tree_leaves(value)]
        for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            yield from _of_attribute(f"{name}.{key}", tensor, names_by_memory)


def _of_attribute(name: str, value: object, names_by_memory: dict[tuple[int, ...], str]) -> Iterator[object]:
    if not isinstance(value, torch.Tensor):
        raise _UnknownError
    yield name, _identify(type(value)), value.dtype, value.device, tuple(value.shape), value.requires_grad
    if value.layout is torch.strided:
        yield value.stride()
        memory = (value.data_ptr(), *value.shape, *value.stride())
        if value.numel() and names_by_memory.setdefault(memory, name) != name:  # shared memory is part of the digest
            yield names_by_memory[memory]
            return
    yield _bytes(value)


def _attribute(graph_module: fx.GraphModule, target: str) -> object:
    owner, _, name = target.rpartition(".")
    return getattr(graph_module.get_submodule(owner), name)


def _identify(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "prims", "prim"):
            raise _UnknownError
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None or name is None or module.partition(".")[0] not in _OPERATOR_PACKAGES or "<" in name:
        raise _UnknownError
    return f"{module}.{name}"


def _leaf(value: object) -> str:
    if isinstance(value, slice):
        return f"slice{[_leaf(part) for part in (value.start, value.stop, value.step)]}"
    if not isinstance(value, (*_PLAIN, fx.Node)):
        raise _UnknownError
    return repr(value)


def _bytes(tensor: torch.Tensor) -> memoryview:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    dense = dense.resolve_conj().resolve_neg()  # lazy conjugates and negatives have no separate bytes
    return bytes_of(dense.cpu()).numpy().data
