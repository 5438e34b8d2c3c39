"""Finds the tensors in the outputs of a model, also in objects of a library's own classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# The only values that torch.export accepts as leaves of an output.
_LEAVES = (torch.Tensor, bool, int, float, str, torch.SymBool, torch.SymInt, torch.SymFloat, type(None))


def named_leaves(outputs: Any, kind: type[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the leaves of one type with their paths, in the order of the fields.

    Args:
        outputs: Any nesting of containers, dataclasses and other objects with public attributes.
        kind: Type of the leaves.
    """
    return _named_leaves(outputs, kind, (), ())


def _named_leaves(
    value: Any, kind: type[Any], path: tuple[Any, ...], owners: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, kind):
        yield path, value
    elif not any(value is owner for owner in owners):  # an object may have its owner as an attribute
        for key, child in _children(value):
            yield from _named_leaves(child, kind, (*path, key), (*owners, value))


def as_containers(outputs: Any, owners: tuple[Any, ...] = ()) -> Any:
    """Returns an output with a dict in place of every object that ``torch.export`` does not know.

    Such objects are dataclasses, subclasses of dict or list, and other objects with tensors as public attributes.

    Args:
        owners: Objects that contain the output; they are replaced by None.
    """

    def as_dict(leaf: Any) -> Any:
        if isinstance(leaf, _LEAVES):
            return leaf
        if any(leaf is owner for owner in owners):
            return None
        return {str(key): as_containers(child, (*owners, leaf)) for key, child in _children(leaf)} or None

    return pytree.tree_map(as_dict, outputs)


def has_own_classes(outputs: Any) -> bool:
    """Returns True if an output contains an object that `as_containers` replaces."""
    return not all(isinstance(leaf, _LEAVES) for leaf in pytree.tree_leaves(outputs))


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Returns the parts of an object with their names; empty for a leaf."""
    if isinstance(value, (*_LEAVES, nn.Module)) or callable(value):
        return []
    registered = pytree.SUPPORTED_NODES.get(pytree._get_node_type(value))
    if registered is not None and registered.flatten_with_keys_fn is not None:
        return list(registered.flatten_with_keys_fn(value)[0])
    if isinstance(value, Mapping):  # before dataclasses, because ModelOutput and similar classes are both
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif registered is not None:
        return list(enumerate(registered.flatten_fn(value)[0]))
    else:
        # attrs lists the fields of a class, which may have slots.
        fields = getattr(type(value), "__attrs_attrs__", None)
        names = [*getattr(value, "__dict__", ())] if fields is None else [field.name for field in fields]
    return [(name, getattr(value, name)) for name in names if not name.startswith("_") and hasattr(value, name)]
