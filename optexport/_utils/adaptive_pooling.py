"""Pools to sizes that are computed from the sizes of the input. The windows may differ in width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def adaptive_max_pool(x: torch.Tensor, sizes: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes an adaptive maximum over the last axes.

    Args:
        sizes: Output size of each of the last axes.

    Returns:
        The maxima, and the index of each in the flattened last axes.
    """
    if len(sizes) > 1 and (is_one(sizes) or is_even(x, sizes)):
        operator = aten.adaptive_max_pool2d if len(sizes) == 2 else aten.adaptive_max_pool3d
        return operator.default(x, sizes)  # type: ignore[no-any-return]
    index = x.new_zeros((), dtype=torch.int64)
    stride = 1
    for axis in range(-1, -len(sizes) - 1, -1):
        start, end, steps = find_windows(x.shape[axis], sizes[axis])
        places = torch.minimum(start + steps, end - 1)
        index = append_axes(axis, places) * stride + (index if axis == -1 else gather_windows(index, axis, places))
        stride = stride * x.shape[axis]
        windows = gather_windows(x, axis, places)
        x, first = windows.max(axis)
        index = index.expand_as(windows).gather(axis, first.unsqueeze(axis)).squeeze(axis)
    return x, index


def is_one(sizes: Sequence[Any]) -> bool:
    """Returns True if it is certain that every size is 1."""
    return all(isinstance(size, int) and size == 1 for size in sizes)


def is_even(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Returns True if it is certain that all windows have the same width and do not overlap."""
    pairs = list(zip(x.shape[-len(sizes) :], sizes, strict=True))
    return all(isinstance(n, int) and isinstance(size, int) and n % size == 0 for n, size in pairs)


def find_windows(n: Any, size: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns starts and ends of an axis's windows, shaped [size, 1], and steps of the widest."""
    index = torch.arange(size)[:, None]
    return index * n // size, ((index + 1) * n + size - 1) // size, torch.arange((n + size - 1) // size + 1)


def gather_windows(x: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    """Replaces an axis by two: one for the windows, and one for the elements of each."""
    windows: torch.Tensor = x.index_select(axis, places.reshape(-1)).unflatten(axis, places.shape)
    return windows


def append_axes(axis: int, windows: torch.Tensor) -> torch.Tensor:
    """Appends axes of size 1, so that windows broadcast with the axes after theirs."""
    return windows.reshape(*windows.shape, *[1] * (-1 - axis))
