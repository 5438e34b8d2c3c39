"""Elements by their rank, and running extremes and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Ranked = tuple[torch.Tensor, torch.Tensor]


def kthvalue(x: torch.Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> Ranked:
    """Computes ``torch.kthvalue``, which ONNX lacks; the indices of equal elements may differ from torch's."""
    index = _sorted_indices(x, dim, k).narrow(dim, k - 1, 1)
    return _gather(x, dim, index, keepdim)


def median(x: torch.Tensor) -> torch.Tensor:
    """Computes the median of all elements, or NaN if one is NaN."""
    return median_along(x.reshape(-1), 0)[0]


def median_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Ranked:
    """Computes the median along an axis, with its index. Of two middle elements, it is the lower one."""
    k = (x.shape[dim] + 1) // 2
    index = _sorted_indices(x, dim, k).narrow(dim, k - 1, 1)
    if x.is_floating_point():
        first = x.isnan().long().argmax(dim, keepdim=True)
        index = torch.where(x.isnan().any(dim, keepdim=True), first, index)
    return _gather(x, dim, index, keepdim)


def nanmedian(x: torch.Tensor) -> torch.Tensor:
    """Computes the median of all elements that are not NaN."""
    return nanmedian_along(x.reshape(-1), 0)[0]


def nanmedian_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> Ranked:
    """Computes the median along an axis, with its index, ignoring NaN."""
    places = (~x.isnan()).long().sum(dim, keepdim=True).sub(1).clamp(min=0)
    places = torch.div(places, torch.full((), 2, dtype=torch.int64), rounding_mode="floor")
    index = _sorted_indices(x, dim, x.shape[dim]).gather(dim, places)
    return _gather(x, dim, index, keepdim)


def _sorted_indices(x: torch.Tensor, dim: int, count: Any) -> torch.Tensor:
    """Returns the indices of the smallest elements, in order. NaN is larger than all other numbers."""
    if x.is_floating_point():  # ONNX Runtime does not order NaN
        x = torch.where(x.isnan(), torch.full((), math.inf, dtype=x.dtype), x)
    elif x.dtype not in (torch.int32, torch.int64):  # ONNX Runtime does not sort smaller integers
        x = x.int()
    return torch.topk(x, count, dim, largest=False)[1]


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, keepdim: bool) -> Ranked:
    values = x.gather(dim, index)
    return (values, index) if keepdim else (values.select(dim, 0), index.select(dim, 0))


def cumulative_extreme(
    extreme: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a running maximum or minimum, and the index of the last of equal elements.

    The patch of transformers returns another index, and replaces infinity by the largest finite number.

    Args:
        extreme: ``torch.cummax`` or ``torch.cummin``.
    """
    if x.is_floating_point():
        pick, outside = (torch.amax, -math.inf) if extreme is torch.cummax else (torch.amin, math.inf)
        values = pick(_prefixes(x, dim, outside), -1).movedim(-1, dim)
    else:
        values = extreme(x, dim)[0]
    steps = torch.arange(x.shape[dim], device=x.device).reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return values, torch.cummax(torch.where(x == values, steps, 0), dim)[0]


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes running products, which ONNX lacks."""
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    return _prefixes(x, dim, 1).prod(-1).movedim(-1, dim)


def _prefixes(x: torch.Tensor, dim: int, outside: float) -> torch.Tensor:
    """Returns, for each element along an axis, all elements up to it; the two axes are the last ones."""
    size = x.shape[dim]
    is_before = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    return torch.where(is_before, x.movedim(dim, -1).unsqueeze(-2), torch.full((), outside, dtype=x.dtype))
