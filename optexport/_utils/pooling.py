"""Pools with windows that are computed from the sizes of the input, and may differ in width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

aten = torch.ops.aten

# Starts and ends of an axis's windows, shaped [size, 1], and steps of the widest.
Windows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def adaptive_avg_pool(x: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor:
    """Computes an adaptive average over the last axes.

    torch's own decomposition is valid only for the traced sizes.

    Args:
        sizes: Output size of each of the last axes.
    """
    axes = range(-len(sizes), 0)
    if is_one(sizes):
        return x.mean(list(axes), keepdim=True)
    if is_even(x, sizes):
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(sizes) - 1]
        return pool(x, [x.shape[axis] // size for axis, size in zip(axes, sizes, strict=True)])
    for axis, size in zip(axes, sizes, strict=True):
        if not statically_known_true(size == x.shape[axis]):
            x = average_windows(x, axis, find_adaptive_windows(x.shape[axis], size))
    return x


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
        start, end, steps = find_adaptive_windows(x.shape[axis], sizes[axis])
        places = torch.minimum(start + steps, end - 1)
        index = append_axes(axis, places) * stride + (index if axis == -1 else gather_windows(index, axis, places))
        stride = stride * x.shape[axis]
        windows = gather_windows(x, axis, places)
        x, first = windows.max(axis)
        index = index.expand_as(windows).gather(axis, first.unsqueeze(axis)).squeeze(axis)
    return x, index


def avg_pool(x: torch.Tensor, kernels: Sequence[Any], strides: Sequence[Any], *, ceil_mode: bool) -> torch.Tensor:
    """Computes the average of each window over the last axes, without padding."""
    for axis, kernel, stride in zip(range(-len(kernels), 0), kernels, strides, strict=True):
        n = x.shape[axis]
        if statically_known_true(kernel == n):
            x = x.mean(axis, keepdim=True)
        elif not statically_known_true(kernel == 1) or not statically_known_true(stride == 1):
            x = average_windows(x, axis, find_windows(n, kernel, stride, ceil_mode=ceil_mode))
    return x


def max_pool(x: torch.Tensor, kernels: Sequence[Any], strides: Sequence[Any], *, ceil_mode: bool) -> torch.Tensor:
    """Computes the maximum of each window over the last axes, without padding."""
    for axis, kernel, stride in zip(range(-len(kernels), 0), kernels, strides, strict=True):
        n = x.shape[axis]
        if statically_known_true(kernel == n):
            x = x.amax(axis, keepdim=True)
        elif not statically_known_true(kernel == 1) or not statically_known_true(stride == 1):
            start, end, steps = find_windows(n, kernel, stride, ceil_mode=ceil_mode)
            x = gather_windows(x, axis, torch.minimum(start + steps, end - 1)).amax(axis)
    return x


def is_one(sizes: Sequence[Any]) -> bool:
    """Returns True if it is certain that every size is 1."""
    return all(isinstance(size, int) and size == 1 for size in sizes)


def is_even(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Returns True if it is certain that all windows have the same width and do not overlap."""
    pairs = list(zip(x.shape[-len(sizes) :], sizes, strict=True))
    return all(isinstance(n, int) and isinstance(size, int) and n % size == 0 for n, size in pairs)


def find_adaptive_windows(n: Any, size: Any) -> Windows:
    """Returns the windows of adaptive pooling from a size to another."""
    index = torch.arange(size)[:, None]
    return index * n // size, ((index + 1) * n + size - 1) // size, torch.arange((n + size - 1) // size + 1)


def find_windows(n: Any, kernel: Any, stride: Any, *, ceil_mode: bool) -> Windows:
    """Returns the windows of pooling. With ``ceil_mode``, the last one may end early."""
    if statically_known_true(kernel == stride):
        count = -(-n // stride) if ceil_mode else n // stride
    elif ceil_mode:  # the last window must start within the axis
        count = torch.sym_min(-(-(n - kernel) // stride) + 1, -(-n // stride))
    else:
        count = (n - kernel) // stride + 1
    start = torch.arange(count)[:, None] * stride
    return start, torch.clamp(start + kernel, max=n), torch.arange(kernel)


def average_windows(x: torch.Tensor, axis: int, windows: Windows) -> torch.Tensor:
    """Replaces an axis by the averages of windows."""
    start, end, steps = windows
    places = start + steps
    values = gather_windows(x, axis, places.clamp(max=x.shape[axis] - 1))
    values = torch.where(append_axes(axis, places < end), values, torch.zeros((), dtype=x.dtype))
    return values.sum(axis) / append_axes(axis, end - start).squeeze(axis)


def gather_windows(x: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    """Replaces an axis by two: one for the windows, and one for the elements of each."""
    windows: torch.Tensor = x.index_select(axis, places.reshape(-1)).unflatten(axis, places.shape)
    return windows


def append_axes(axis: int, windows: torch.Tensor) -> torch.Tensor:
    """Appends axes of size 1, so that windows broadcast with the axes after theirs."""
    return windows.reshape(*windows.shape, *[1] * (-1 - axis))
