"""Resizes batches: to other sizes, to traceable sizes, and split to fit into memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from optexport.errors import ConfigError
from optexport.signature.index_values import is_whole, list_ranges
from optexport.signature.signature import Batch, Dim, Dynamic, Signature

# Limits of a batch in rows and in elements: 32 texts of 512 tokens, or 6 images of 224 by 224.
_ROWS = 32
_ELEMENTS = 1 << 20


def resize(batch: Mapping[str, torch.Tensor], signature: Signature, sizes: Mapping[str, int]) -> Batch:
    """Cuts or repeats the dynamic axes of a batch to other sizes.

    Repeated rows are rolled along their other dynamic axes, or scaled if there are none. Repeats along other axes are
    scaled. No two repeats of floats are equal. Integers are not scaled, unless they index a dimension that changes. A
    vector of sorted integers stays sorted. Every row of a mask keeps a shown position, and every row of ids its start.

    Args:
        sizes: New size of each dynamic dimension, by name.
    """
    axes, sizes_before = signature.sizes_at(sizes), signature.sizes(batch)
    resized = {name: resize_tensor(tensor, axes.get(name, {})) for name, tensor in batch.items()}
    for name, tensor in batch.items():
        if name in signature.indexes:
            resized[name] = signature.indexes[name].fit(resized[name], sizes_before, sizes)
        elif tensor.dtype is torch.bool or "mask" in name:
            resized[name] = _keep_both_values(name, resized[name], tensor)
        elif is_whole(tensor):
            resized[name] = _keep_starts(resized[name], tensor)
    return resized


def _keep_starts(ids: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Returns ids in which no row starts with padding (zeros), if the original has padding only after other ids.

    Models that count the ids of a row, such as those that pack sequences, reject empty rows.
    """
    if original.dim() != 2 or ids.numel() == 0 or bool((original[:, 0] == 0).any()) or not bool((original == 0).any()):
        return ids
    starts = original[torch.arange(ids.shape[0]) % original.shape[0], :1]
    return torch.cat([torch.where(ids[:, :1] == 0, starts, ids[:, :1]), ids[:, 1:]], dim=1)


def _keep_both_values(name: str, mask: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Returns a shortened mask in which every row still has a position that it shows, and one that it hides.

    Applies only to values that every row of the original mask has.
    """
    is_cut = mask.dim() > 0 and 0 < mask.shape[-1] < original.shape[-1]
    if not is_cut or not bool(((original == 0) | (original == 1)).all()):
        return mask
    shown, positions = 0 if "pad" in name else 1, torch.arange(mask.shape[-1])
    for value, position in ((1 - shown, len(positions) - 1), (shown, 0)):
        if bool((original == value).any(-1).all()):
            is_lost = ~(mask == value).any(-1, keepdim=True)
            mask = torch.where(is_lost & (positions == position), torch.full_like(mask, value), mask)
    return mask


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
        if _is_sorted(tensor):
            position = torch.arange(size) * (tensor.shape[0] - 1) // max(size - 1, 1)
        tensor = tensor.index_select(axis, position)
        if fractions and bool(turn.any()):
            factors = 1 - turn * _GOLDEN % 1 / 2  # all different, and all above 1/2
            tensor = tensor * factors.to(tensor.dtype).reshape(-1, *[1] * (tensor.dim() - axis - 1))
    return tensor


def _is_sorted(tensor: torch.Tensor) -> bool:
    """Returns True for a vector of integers in order, such as segment ids, offsets or lengths of packed sequences."""
    if tensor.dim() != 1 or not is_whole(tensor):
        return False
    steps = tensor.long().diff()
    return bool((steps >= 0).all() or (steps <= 0).all())


_GOLDEN = (5**0.5 - 1) / 2


def repeat_single_row(batch: Batch) -> Batch:
    """Repeats a batch of one row to two, because ``torch.export`` fixes each axis of size 1."""
    if any(tensor.dim() == 0 or tensor.shape[0] != 1 for tensor in batch.values()):
        return batch
    return make_traceable(batch, {name: {0: "batch"} for name in batch})


def make_traceable(batch: Batch, dynamic: Dynamic, values: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Batch:
    """Returns a batch whose dynamic axes have at least size 2 and a size in range.

    Args:
        values: Dimensions that the values of an input index, by input.

    Raises:
        ConfigError: A declared axis has size 0 and cannot be repeated.
    """
    sizes: dict[str, int] = {}
    sizes_before: dict[str, int] = {}
    for name, axes in dynamic.items():
        for axis, declared in axes.items():
            if batch[name].shape[axis] == 0:
                raise ConfigError(
                    f"axis {axis} is declared dynamic, but has size 0",
                    location=f"inputs: {name}",
                    hint="Use an input with at least one element along this axis, or remove it from the dynamic axes.",
                )
            dim = declared if isinstance(declared, Dim) else Dim(declared)
            size = max(batch[name].shape[axis], dim.min, 2)
            sizes.setdefault(dim.name, dim.fit(size + dim.multiple_of - 1))  # rounded up
            sizes_before.setdefault(dim.name, batch[name].shape[axis])
    resized = {
        name: resize_tensor(
            tensor,
            {axis: sizes[d.name if isinstance(d, Dim) else d] for axis, d in dynamic.get(name, {}).items()},
        )
        for name, tensor in batch.items()
    }
    for name, dims in values.items():
        if resizable := [dim for dim in dims if dim in sizes]:
            index = next(list_ranges(batch[name], resizable, sizes_before))
            resized[name] = index.fit(resized[name], sizes_before, sizes)
    return resized


def iter_larger_batches(
    batch: Mapping[str, torch.Tensor],
    dynamic: Dynamic,
    values: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[Batch]:
    """Yields batches whose dynamic axes have larger sizes without small factors, or else their largest size.

    At such sizes a model that pads to a multiple does pad, and few computed sizes are equal by chance. The first axis
    of each input, most often the batch, stays as it is. Nothing is yielded if no axis can grow.

    Args:
        values: Dimensions that the values of an input index, by input.
    """
    shapes = [{name: tensor.shape for name, tensor in batch.items()}]
    for times in _TIMES:
        grown: dict[str, dict[int, str | Dim]] = {}
        for name, axes in dynamic.items():
            for axis, declared in axes.items():
                dim = declared if isinstance(declared, Dim) else Dim(declared)
                if axis:
                    size = _find_general_size(dim, times * batch[name].shape[axis])
                    grown.setdefault(name, {})[axis] = replace(dim, min=size)
        larger = make_traceable(dict(batch), grown, values)
        shapes.append({name: tensor.shape for name, tensor in larger.items()})
        if shapes[-1] not in shapes[:-1]:
            yield larger


# How many times as large the sizes are at least. A table of a model may contain several times the example.
_TIMES = (1, 4)


def _find_general_size(dim: Dim, size: int) -> int:
    """Returns the next size whose multiple of the dimension's step has no factor up to 7, or the end of the range."""
    multiples = itertools.count(size // dim.multiple_of + 1)
    size = next(dim.multiple_of * multiple for multiple in multiples if math.gcd(multiple, 2 * 3 * 5 * 7) == 1)
    return dim.fit(size)


def split_batch(batch: Batch, inputs: Sequence[str], dim: Dim, *, declared: bool = True) -> tuple[Batch, ...]:
    """Splits a batch along its batch axis into smaller batches.

    Args:
        inputs: Names of the inputs whose first axis is the batch axis.
        dim: Allowed sizes of a batch.
        declared: True if the user declared the batch axis. Otherwise all batches get one size, because the model may
            accept no other, and left-over rows are dropped.

    Returns:
        The parts, or the batch itself if it is small enough or cannot be split into allowed sizes.
    """
    rows = batch[inputs[0]].shape[0]
    elements = sum(batch[name].numel() for name in inputs) // max(rows, 1)
    size = max(min(_ROWS, _ELEMENTS // max(elements, 1), dim.max or _ROWS), dim.min, 2)
    if rows <= size or dim.multiple_of > 1 or any(batch[name].shape[0] != rows for name in inputs):
        return (batch,)
    count = -(-rows // size)
    if declared:
        if rows // count < max(dim.min, 1):
            return (batch,)
        ends = [rows * index // count for index in range(count + 1)]
    else:
        size = next((divisor for divisor in range(size, size // 2, -1) if rows % divisor == 0), rows // count)
        ends = list(range(0, rows + 1, size))
    return tuple({**batch, **{name: batch[name][a:b] for name in inputs}} for a, b in itertools.pairwise(ends))
