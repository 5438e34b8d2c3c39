"""Finds the tensors that a call writes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

# These write to later arguments in training mode, which is their sixth argument. The value here is its default.
_WRITING_STATISTICS = {torch.nn.functional.batch_norm: False, torch.nn.functional.instance_norm: True}


def overwritten(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that a function writes to, judged by its name."""
    name = getattr(func, "__name__", "").partition(".")[0]  # such as add_.Tensor
    targets = [kwargs.get("out")]
    if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
        targets += args[:1]
    elif func in _WRITING_STATISTICS:
        is_training = [*args[5:6], *(kwargs[key] for key in ("training", "use_input_stats") if key in kwargs)]
        if any(is_training or [_WRITING_STATISTICS[func]]):
            targets += [*args, *kwargs.values()]
    return [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
