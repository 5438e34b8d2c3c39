"""Cuts the rows of the user's data into batches that fit in memory, and says how many of them were checked."""

from __future__ import annotations

from collections.abc import Sequence

from optexport.proof.cases import Batch, Case
from optexport.signature import Dim

# A batch holds at most so many rows, and so many numbers: 32 texts of 512 tokens, or 6 images of 224 by 224.
_ROWS = 32
_NUMBERS = 1 << 20


def shards(batch: Batch, inputs: Sequence[str], dim: Dim) -> tuple[Batch, ...]:
    """Cuts a batch into batches of equal sizes, the last of which may begin with rows of the one before.

    Args:
        inputs: Those whose first axis is the batch.
        dim: The sizes that a batch may have.

    Returns:
        The batch itself where it is small enough, or no batch of which every shard is one could be smaller.
    """
    rows = batch[inputs[0]].shape[0]
    numbers = sum(batch[name].numel() for name in inputs) // max(rows, 1)
    size = max(min(_ROWS, _NUMBERS // max(numbers, 1), dim.max or _ROWS), dim.min, 2)
    if rows <= size or any(batch[name].shape[0] != rows for name in inputs):
        return (batch,)
    starts = (*range(0, rows - size, size), rows - size)
    return tuple({**batch, **{name: batch[name][start : start + size] for name in inputs}} for start in starts)


def why_unchecked(real: Sequence[Batch], rows: int, checked: Sequence[Case]) -> tuple[str, ...]:
    """How much of the user's data was not checked; nothing where all of it was.

    Args:
        rows: How many rows the data has, where they were cut into batches.
    """
    count = sum(case.data for case in checked)
    if count == len(real):
        return ()
    if not rows:
        return (f"data: {count} of {len(real)} batches are checked",)
    found = sum(_rows(case.batch, real) for case in checked if case.data)
    return (f"data: {min(found, rows)} of {rows} rows are checked",)


def _rows(batch: Batch, real: Sequence[Batch]) -> int:
    """The size of the axis that was cut: that of the first input that differs between the batches."""
    cut = (name for name, tensor in batch.items() if not all(tensor is other[name] for other in real))
    return batch[next(cut)].shape[0]
