"""Stops a trace whose sizes become so long expressions that it would not finish.

``torch.export`` stores every size as an expression of the inputs' sizes, and simplifies all of them at each comparison.
If these expressions double from layer to layer, the time of a trace does too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# A trace stops at a size of more operations, if it has taken that many seconds of CPU time.
MAX_OPERATIONS = 100
MAX_SECONDS = 60.0


class LongSizeError(Exception):
    """A size is an expression with too many operations."""


class LongSizeDetector(TorchFunctionMode):
    """Raises `LongSizeError` if a trace takes long and a function returns a tensor with a very long size."""

    def __enter__(self) -> LongSizeDetector:
        self._started = time.thread_time()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if time.thread_time() - self._started < MAX_SECONDS:
            return result
        for value in tree_leaves(result):
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and not size.node.expr.is_Symbol:
                    operations = int(size.node.expr.count_ops())
                    if operations > MAX_OPERATIONS:
                        raise LongSizeError(f"a size is an expression of other sizes with {operations} operations")
        return result
