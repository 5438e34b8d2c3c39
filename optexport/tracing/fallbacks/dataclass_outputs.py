"""Registers the dataclasses that models return, as ``torch.export`` requires.

One of 50 hand-written models and none of 11 zoo models need this (tests/zoo/rescues.py).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def register_dataclasses(model: nn.Module, arguments: Mapping[str, torch.Tensor]) -> bool:
    """Registers the dataclasses in a model's outputs with torch.

    A class that the model creates again in every call is not registered, since it would never be recognised.

    Returns:
        True if a class was registered. False if there is none, or if the model fails.
    """
    try:
        unknown = set(_returned(model, arguments)) & set(_returned(model, arguments))
    except Exception:  # the model's code may raise anything; the caller reports its error
        return False
    for cls in unknown:
        torch.export.register_dataclass(cls)
    return bool(unknown)


def _returned(model: nn.Module, arguments: Mapping[str, torch.Tensor]) -> Iterator[type[Any]]:
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}  # a call may change them
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return _unknown(torch.func.functional_call(model, buffers, (), copy.deepcopy(dict(arguments))))


def _unknown(value: Any) -> Iterator[type[Any]]:
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield type(leaf)
            yield from _unknown([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
