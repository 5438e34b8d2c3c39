"""Stops a trace whose sizes become so long expressions that it would not finish.

``torch.export`` stores every size as an expression of the inputs' sizes, and simplifies all of them at each comparison.
In Swin, which pads to whole windows and crops again in every stage, the expressions double from layer to layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Swin reaches this after one minute, and did not finish in four. Ten other models that finish have 18 at most.
MAX_OPERATIONS = 100


class LongSizeError(Exception):
    """A size is an expression with too many operations."""


class LongSizeDetector(TorchFunctionMode):
    """Raises `LongSizeError` if a function returns a tensor with a very long size expression."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and not size.node.expr.is_Symbol:
                    operations = int(size.node.expr.count_ops())
                    if operations > MAX_OPERATIONS:
                        raise LongSizeError(f"a size is an expression of other sizes with {operations} operations")
        return result
