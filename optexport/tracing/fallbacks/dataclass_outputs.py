"""Models that return instances of a dataclass, which torch looks into only where it was told to."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def register_dataclasses(model: nn.Module, arguments: Mapping[str, torch.Tensor]) -> bool:
    """Tells torch of the dataclasses in what a model returns, for as long as the process lives.

    Not of one that every call makes anew, of which no end would come.

    Returns:
        Whether there is one that it did not know. False where the model fails, too.
    """
    try:
        unknown = set(_returned(model, arguments)) & set(_returned(model, arguments))
    except Exception:  # the model's own code may raise anything, and is called again by who tells the user of it
        return False
    for cls in unknown:
        torch.export.register_dataclass(cls)
    return bool(unknown)


def _returned(model: nn.Module, arguments: Mapping[str, torch.Tensor]) -> Iterator[type[Any]]:
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}  # which a call may change
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return _unknown(torch.func.functional_call(model, buffers, (), copy.deepcopy(dict(arguments))))


def _unknown(value: Any) -> Iterator[type[Any]]:
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield type(leaf)
            yield from _unknown([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
