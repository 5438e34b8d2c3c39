"""Reductions into places that an index selects."""

from __future__ import annotations

import math

import torch

from optexport.exporters.onnx.replacements.arithmetic import divide

aten = torch.ops.aten


def scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Computes ``torch.scatter_reduce``, with means and with infinite extremes.

    ONNX has no mean here; ``torch.onnx`` writes the last element instead.
    """
    if reduce != "mean" and (include_self or not x.is_floating_point()):
        return aten.scatter_reduce.two(x, dim, index, source, reduce, include_self=include_self)  # type: ignore[no-any-return]
    count = torch.zeros_like(x, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(source, dtype=torch.int64))
    if not include_self:
        neutral = {"prod": 1, "amax": -math.inf, "amin": math.inf}.get(reduce, 0)
        x = torch.where(count > 0, torch.full((), neutral, dtype=x.dtype), x)
    if reduce != "mean":
        return x.scatter_reduce(dim, index, source, reduce)
    total, count = x.scatter_add(dim, index, source), count + 1 if include_self else count.clamp(min=1)
    return divide(total, count.to(x.dtype), rounding_mode=None if x.is_floating_point() else "floor")


def index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Computes ``torch.index_reduce``, which ONNX lacks."""
    index = index.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())).expand_as(source)
    return scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


def bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Computes ``torch.bincount``; the translation of transformers ignores the weights."""
    counts = torch.bincount(x, minlength=minlength)
    if weights is None:
        return counts
    weights = weights if weights.dtype == torch.float32 else weights.double()
    return torch.zeros_like(counts, dtype=weights.dtype).scatter_add(0, x, weights)


def histogram(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> torch.Tensor:
    """Computes ``torch.histc``.

    Values outside the range are not counted, and the upper end counts in the last bin. The patch of transformers counts
    values outside the range in the first and the last bin.
    """
    x = x.reshape(-1)
    minimum, maximum = (x.min(), x.max()) if low == high else (x.new_tensor(low), x.new_tensor(high))
    is_constant = (minimum == maximum).to(x.dtype)
    minimum, maximum = minimum - is_constant, maximum + is_constant
    places = ((x - minimum) * bins / (maximum - minimum)).clamp(0, bins - 1).long()
    return x.new_zeros(bins).scatter_add(0, places, ((x >= minimum) & (x <= maximum)).to(x.dtype))
