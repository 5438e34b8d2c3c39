"""Cuts the rows of the user's data into batches that fit in memory, and says how many of them were checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from optexport.parity.cases import Case
from optexport.signature.signature import Batch, Dim

# A batch holds at most so many rows, and so many numbers: 32 texts of 512 tokens, or 6 images of 224 by 224.
_ROWS = 32
_NUMBERS = 1 << 20


def shards(batch: Batch, inputs: Sequence[str], dim: Dim, *, declared: bool = True) -> tuple[Batch, ...]:
    """Cuts a batch into batches, so that each row is in one of them.

    Args:
        inputs: Those whose first axis is the batch.
        dim: The sizes that a batch may have.
        declared: Whether the user said so. If not, all have one size, since the model may turn out to take no other;
            rows that are left over are in none.

    Returns:
        The batch itself where it is small enough, or cannot be cut into any of those sizes.
    """
    rows = batch[inputs[0]].shape[0]
    numbers = sum(batch[name].numel() for name in inputs) // max(rows, 1)
    size = max(min(_ROWS, _NUMBERS // max(numbers, 1), dim.max or _ROWS), dim.min, 2)
    if rows <= size or any(batch[name].shape[0] != rows for name in inputs):
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


def why_unchecked(real: Sequence[Batch], rows: int, checked: Sequence[Case]) -> tuple[str, ...]:
    """How much of the user's data was not checked; nothing where all of it was.

    Args:
        rows: How many rows the data has, where they were cut into batches.
    """
    data = [case.batch for case in checked if case.data]
    if not rows:
        return () if len(data) == len(real) else (f"data: {len(data)} of {len(real)} batches are checked",)
    # What was cut are the inputs that are not the same in all batches.
    cut = next(name for name, tensor in real[0].items() if not all(tensor is other[name] for other in real))
    found = sum(batch[cut].shape[0] for batch in data)
    return () if found == rows else (f"data: {found} of {rows} rows are checked",)
