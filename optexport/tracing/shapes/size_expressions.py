"""Stops a trace whose sizes become expressions that ``torch.export`` would reason about without an end in sight.

It keeps every size as an expression of the inputs' sizes, and simplifies all of them at each comparison. Where a model
pads what it computes to whole windows, and cuts and pads that again stage after stage, as Swin does, they double from
one layer to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Swin passes it after a minute, and had not ended after four. Of ten others that trace through the longest had 18.
MOST_OPERATIONS = 100


class LongSizeError(Exception):
    """A size is an expression of too many operations."""


class SizesWatched(TorchFunctionMode):
    """Within it, an operation that gives a tensor whose size is too long an expression raises `LongSizeError`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and not size.node.expr.is_Symbol:
                    operations = int(size.node.expr.count_ops())
                    if operations > MOST_OPERATIONS:
                        raise LongSizeError(f"a size would be computed of others by {operations} operations")
        return result
