"""Values of whole-number inputs that index a dynamic dimension, such as lengths, edges and positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class IndexValues:
    """Range of the values of an input: from `low` to the size of a dimension plus `high`.

    Values below `low`, such as -100 for a label to ignore, belong to no position and never change.

    Attributes:
        dims: Names of the dimensions; the smallest size counts.
        low: 0 for positions, 1 for lengths.
        high: -1 for positions, 0 for lengths and for the ends of segments.
        adds_up: True for lengths of parts that add up to the size of the dimension.
    """

    dims: tuple[str, ...]
    low: int = 0
    high: int = -1
    adds_up: bool = False

    def fit(self, values: torch.Tensor, old: Mapping[str, int], new: Mapping[str, int]) -> torch.Tensor:
        """Scales values to another size of a dimension; the order and the ends of the range stay.

        Args:
            values: Whole numbers of any shape.
            old: Size of each dimension that the values fit, by name.
            new: Size of each dimension that the results must fit, by name.
        """
        dims = [name for name in self.dims if name in old and name in new]
        if self.adds_up:
            return _divide(min(new[name] for name in dims), values, self.low) if dims else values
        if all(old[name] == new[name] for name in dims):
            return values
        end = max(min(old[name] for name in dims) + self.high, self.low)
        new_end = max(min(new[name] for name in dims) + self.high, self.low)
        steps = values.long().clamp(min=self.low, max=end) - self.low
        fitted = self.low + steps * (new_end - self.low) // max(end - self.low, 1)
        return torch.where(values < self.low, values.long(), fitted).to(values.dtype)


def _divide(size: int, values: torch.Tensor, low: int) -> torch.Tensor:
    """Scales a vector of lengths so that they add up to a size; none is below `low` if the size allows that."""
    total, base = int(values.sum()), min(low, size // max(len(values), 1))
    if total == size or not total:
        return values
    ends = values.long().cumsum(0) * (size - base * len(values)) // total
    return (base + torch.diff(ends, prepend=ends.new_zeros(1))).to(values.dtype)


def suggest_values(batch: Mapping[str, torch.Tensor]) -> str | None:
    """Returns a hint that names the inputs whose values may have to fit a size; None if there are none."""
    names = [
        name for name, tensor in batch.items() if is_whole(tensor) and "mask" not in name and bool((tensor > 0).any())
    ]
    if not names:
        return None
    return (
        f"If the values of {' or '.join(names)} are positions or lengths in an axis, or add up to its size, name it: "
        f'[inputs.values] {names[0]} = {{ indexes = "AXIS" }}.'
    )


def is_whole(tensor: torch.Tensor) -> bool:
    """Returns True for integers, False for booleans and real numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def list_ranges(values: torch.Tensor, dims: Sequence[str], sizes: Mapping[str, int]) -> Iterator[IndexValues]:
    """Yields the ranges that values may have in dimensions, most likely first.

    Args:
        values: Whole numbers, with at least one element.
        sizes: Size of each dimension, by name.
    """
    lowest, highest, size = int(values.min()), int(values.max()), min(sizes[name] for name in dims)
    if lowest >= 1 and highest <= size:
        yield IndexValues(tuple(dims), 1, 0)
    if highest == size:
        yield IndexValues(tuple(dims), 0, 0)
    else:
        yield IndexValues(tuple(dims))
    if values.dim() == 1 and lowest >= 0 and int(values.sum()) == size:
        yield IndexValues(tuple(dims), min(lowest, 1), 0, adds_up=True)
