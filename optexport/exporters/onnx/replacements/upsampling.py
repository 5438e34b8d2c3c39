"""Upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


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
