"""Resizes batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optexport.signature.signature import Batch, Signature


def resize(batch: Mapping[str, torch.Tensor], signature: Signature, sizes: Mapping[str, int]) -> Batch:
    """Cuts or repeats the dynamic axes of a batch to other sizes.

    Repeated rows are rolled along their other dynamic axes, or scaled if there are none. Repeats along other axes are
    scaled. No two repeats of floats are equal. Integers are not scaled.

    Args:
        sizes: New size of each dynamic dimension, by name.
    """
    axes = signature.sizes_at(sizes)
    return {name: resize_tensor(tensor, axes.get(name, {})) for name, tensor in batch.items()}


def resize_tensor(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Resizes some axes of one tensor; see `resize`.

    Args:
        sizes: New sizes by axis.
    """
    rolled = [axis for axis in sizes if axis != 0 and tensor.shape[axis] > 1]
    if rolled and sizes.get(0, 0) > tensor.shape[0]:
        turns = range(-(-sizes[0] // tensor.shape[0]))
        tensor = torch.cat([tensor.roll([turn] * len(rolled), rolled) for turn in turns])
    fractions = tensor.is_floating_point() and not bool((tensor == tensor.round()).all())
    for axis, size in sizes.items():
        turn, position = torch.arange(size) // tensor.shape[axis], torch.arange(size) % tensor.shape[axis]
        tensor = tensor.index_select(axis, position)
        if fractions and bool(turn.any()):
            factors = 1 - turn * _GOLDEN % 1 / 2  # all different, and all above 1/2
            tensor = tensor * factors.to(tensor.dtype).reshape(-1, *[1] * (tensor.dim() - axis - 1))
    return tensor


_GOLDEN = (5**0.5 - 1) / 2
