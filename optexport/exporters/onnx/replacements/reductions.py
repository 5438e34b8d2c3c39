"""Sums and means over many positions, along the last axis first.

ONNX Runtime 1.31 adds all positions up in float32, one after the other, while torch adds up in a tree. The mean of 3
million positions is then off by several times torch's error (tests/exporters/onnx/test_reductions.py). Two steps are
about as precise as torch. For few positions they only take longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
# The number of positions from which on two steps are used.
_MANY = 10_000
# In lower precision the result of the first step would be rounded once more.
_DTYPES = (torch.float32, torch.float64)


def mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes ``torch.mean``."""
    return _reduce(torch.mean, x if dtype is None else x.to(dtype), dim, keepdim)


def sum_(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes ``torch.sum``."""
    return _reduce(torch.sum, x if dtype is None else x.to(dtype), dim, keepdim)


def _reduce(operator: Any, x: torch.Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> torch.Tensor:
    dims = [dim] if isinstance(dim, int) else dim
    axes = sorted(axis % x.dim() for axis in dims) if dims else list(range(x.dim()))
    if len(axes) < 2 or x.dtype not in _DTYPES or math.prod(_size(x, axis) for axis in axes) < _MANY:
        return operator(x) if dims is None else operator(x, dims, keepdim)  # type: ignore[no-any-return]
    *others, last = axes
    result: torch.Tensor = operator(operator(x, last, keepdim=True), others, keepdim=True)
    return result if keepdim else result.squeeze(axes)


def _size(x: torch.Tensor, axis: int) -> int:
    """Returns the size of an axis in the example, without a guard on it."""
    size: Any = x.shape[axis]
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
