"""Operators that move or choose elements."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from optexport.exporters.onnx.replacements.arithmetic import remainder

aten = torch.ops.aten


def roll(x: torch.Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> torch.Tensor:
    """Computes ``torch.roll`` for any shifts and sizes.

    The patch of transformers fixes the split point at the traced size. It skips the roll if that size is a multiple of
    the shift.
    """
    steps = (shifts,) if isinstance(shifts, int | torch.SymInt) else shifts
    axes = (dims,) if isinstance(dims, int) else dims
    if not axes:
        return roll(x.reshape(-1), steps, 0).reshape(x.shape)
    if all(isinstance(number, int) for number in (*steps, *(x.shape[axis] for axis in axes))):
        same = torch.roll(x, [*steps], [*axes])
        return same.clone() if same is x else same  # an output that is an input would have two names
    for step, axis in zip(steps, axes, strict=True):
        x = x.index_select(axis, remainder(torch.arange(x.shape[axis]) - step, x.shape[axis]))
    return x


def fftshift(x: torch.Tensor, dim: int | Sequence[int] | None = None, *, back: bool = False) -> torch.Tensor:
    """Computes ``torch.fft.fftshift``, or ``ifftshift``.

    ONNX supports shifts of known sizes only.

    Args:
        back: True for ``ifftshift``.
    """
    axes = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    for axis in axes:
        middle = x.shape[axis] // 2 if back else (x.shape[axis] + 1) // 2
        x = torch.cat([x.narrow(axis, middle, x.shape[axis] - middle), x.narrow(axis, 0, middle)], axis)
    return x


def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Writes the source's elements, in order, to the places that a mask selects.

    The patch of transformers also reads the source for unselected places, and fails if the source is empty.
    """
    return x.masked_scatter(mask, torch.cat([source.reshape(-1), source.new_zeros(1)]))


def masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Selects elements by an index, because ``torch.onnx`` lacks ``torch.masked_select``."""
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


def copy(x: torch.Tensor, source: torch.Tensor, *_: object) -> torch.Tensor:
    """Computes ``x.copy_(source)``; the write of ``torch.onnx`` into a view does not broadcast."""
    return x.copy_(source if source.dim() == x.dim() else source.expand_as(x))


def squeeze(x: torch.Tensor, dims: int | Sequence[int] | None = None) -> torch.Tensor:
    """Removes axes whose size is known to be 1.

    ONNX fails on an axis of another size, which torch ignores.
    """
    axes = range(x.dim()) if dims is None else (dims,) if isinstance(dims, int) else dims
    single = [axis for axis in axes if x.dim() and isinstance(x.shape[axis], int) and x.shape[axis] == 1]
    return x.squeeze(single) if single else x.clone()


def pad_sequence(
    sequences: Sequence[torch.Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    """Stacks sequences of any lengths, which may depend on values."""
    longest = functools.reduce(torch.sym_max, (sequence.shape[0] for sequence in sequences))
    rows = []
    for sequence in sequences:
        length = sequence.shape[0]
        padded = torch.cat([sequence, sequence.new_full((1, *sequence.shape[1:]), padding_value)])
        positions = torch.arange(longest) - (longest - length if padding_side == "left" else 0)
        is_inside = (positions >= 0) & (positions < length)
        rows.append(padded.index_select(0, torch.where(is_inside, positions, length)))
    return torch.stack(rows, 0 if batch_first else 1)
