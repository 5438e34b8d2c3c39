"""Pooling to a given size, and upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

aten = torch.ops.aten


def upsample_nearest(
    upsample: Any, x: torch.Tensor, sizes: Sequence[Any] | None, factors: Sequence[float] | None = None
) -> torch.Tensor:
    """Upsamples to nearest neighbors with torch's indices.

    An index is ``int(i * before / after)`` in float32. ONNX Runtime divides by ``after / before``. From size 14 to 4,
    it reads index 6 for the third element, and torch reads 7. Both agree if the new size is a multiple of the old one.
    From size 3 with a factor of 1.3, ONNX Runtime copies the input, unlike torch.
    """
    before = x.shape[2:]
    if sizes is None:
        if factors is None or all(float(factor).is_integer() for factor in factors):
            return upsample(x, sizes, factors)  # type: ignore[no-any-return]
        after = [torch.sym_int(size * factor) for size, factor in zip(before, factors, strict=True)]
        steps = [torch.full((), 1 / factor, dtype=torch.float32) for factor in factors]
    else:
        after = [*sizes]
        if all(statically_known_true(end % start == 0) for start, end in zip(before, after, strict=True)):
            return upsample(x, sizes, factors)  # type: ignore[no-any-return]
        ends = [
            [torch.full((), size, dtype=torch.float32) for size in pair] for pair in zip(before, after, strict=True)
        ]
        steps = [start / end for start, end in ends]
    for axis, (size, step) in enumerate(zip(after, steps, strict=True), start=2):
        places = (torch.arange(size, dtype=torch.float32) * step).long().clamp(max=x.shape[axis] - 1)
        x = x.index_select(axis, places)
    return x


def adaptive_avg_pool(x: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor:
    """Computes an adaptive average over the last axes.

    torch's own decomposition is valid only for the traced sizes.

    Args:
        sizes: Output size of each of the last axes.
    """
    axes = range(-len(sizes), 0)
    if _is_one(sizes):
        return x.mean(list(axes), keepdim=True)
    if _is_even(x, sizes):
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(sizes) - 1]
        return pool(x, [x.shape[axis] // size for axis, size in zip(axes, sizes, strict=True)])
    for axis, size in zip(axes, sizes, strict=True):
        start, end, steps = _windows(x.shape[axis], size)
        places = start + steps
        windows = _gather_windows(x, axis, places.clamp(max=x.shape[axis] - 1))
        windows = torch.where(_append_axes(axis, places < end), windows, torch.zeros((), dtype=x.dtype))
        x = windows.sum(axis) / _append_axes(axis, end - start).squeeze(axis)
    return x


def adaptive_max_pool(x: torch.Tensor, sizes: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes an adaptive maximum over the last axes.

    Args:
        sizes: Output size of each of the last axes.

    Returns:
        The maxima, and the index of each in the flattened last axes.
    """
    if len(sizes) > 1 and (_is_one(sizes) or _is_even(x, sizes)):
        operator = aten.adaptive_max_pool2d if len(sizes) == 2 else aten.adaptive_max_pool3d
        return operator.default(x, sizes)  # type: ignore[no-any-return]
    index = x.new_zeros((), dtype=torch.int64)
    stride = 1
    for axis in range(-1, -len(sizes) - 1, -1):
        start, end, steps = _windows(x.shape[axis], sizes[axis])
        places = torch.minimum(start + steps, end - 1)
        index = _append_axes(axis, places) * stride + (index if axis == -1 else _gather_windows(index, axis, places))
        stride = stride * x.shape[axis]
        windows = _gather_windows(x, axis, places)
        x, first = windows.max(axis)
        index = index.expand_as(windows).gather(axis, first.unsqueeze(axis)).squeeze(axis)
    return x, index


def _is_one(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) and size == 1 for size in sizes)


def _is_even(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Returns True if it is certain that all windows have the same width and do not overlap."""
    pairs = list(zip(x.shape[-len(sizes) :], sizes, strict=True))
    return all(isinstance(n, int) and isinstance(size, int) and n % size == 0 for n, size in pairs)


def _windows(n: Any, size: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns starts and ends of an axis's windows, shaped [size, 1], and steps of the widest."""
    index = torch.arange(size)[:, None]
    return index * n // size, ((index + 1) * n + size - 1) // size, torch.arange((n + size - 1) // size + 1)


def _gather_windows(x: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    """Replaces an axis by two: one for the windows, and one for the elements of each."""
    windows: torch.Tensor = x.index_select(axis, places.reshape(-1)).unflatten(axis, places.shape)
    return windows


def _append_axes(axis: int, windows: torch.Tensor) -> torch.Tensor:
    """Appends axes of size 1, so that windows broadcast with the axes after theirs."""
    return windows.reshape(*windows.shape, *[1] * (-1 - axis))
