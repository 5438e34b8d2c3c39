"""Limits the ranges that were not declared: to sizes that can be tried, and to multiples that the model needs.

A U-Net with two levels takes heights that are multiples of 4, and a model with windows multiples of the window.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._sympy.functions import Mod, PythonMod

from optexport.signature.signature import Batch, Dim, Signature
from optexport.tracing.shapes.path_probe import MAX_TRACED_ELEMENTS
from optexport.tracing.shapes.size_conditions import LARGEST, is_broken_at
from optexport.tracing.shapes.size_guards import SuspectSize, is_exclusion, narrow_ranges

# Number of sizes at which a condition must hold to restrict a dimension to multiples.
_CHECKED_MULTIPLES = 32


class RangeLimits:
    """Limits of the ranges that were not declared, as they are found.

    Args:
        declared: The dimensions whose ranges were declared; one without a largest size may get one.
    """

    def __init__(self, declared: Iterable[Dim]) -> None:
        self._declared = {dim.name for dim in declared}
        self._bounded = {dim.name for dim in declared if dim.max is not None}
        self._maxima: dict[str, int] = {}
        self._multiples: dict[str, int] = {}

    def narrow(
        self, signature: Signature, program: ExportedProgram, symbols: Mapping[Any, str], sizes: Mapping[str, int]
    ) -> Signature:
        """Narrows the ranges to the limits, and to sizes that the assertions allow."""
        limited = {
            dim.name: replace(self._end(dim), multiple_of=self._multiples.get(dim.name, dim.multiple_of))
            for dim in self._undeclared(signature)
        }
        narrowed = narrow_ranges(program, symbols, limited, sizes)
        ended = {
            name: self._end(dim)
            for name, dim in signature.dims.items()
            if name in self._declared - self._bounded and name in self._maxima
        }
        return replace(signature, dims={**signature.dims, **narrowed, **ended})

    def add(
        self,
        signature: Signature,
        suspects: Sequence[SuspectSize],
        needed: Sequence[SuspectSize],
        example: Mapping[str, torch.Tensor],
    ) -> bool:
        """Adds the limits that follow from assumptions of a trace; returns True if there are new ones.

        Args:
            suspects: Assumptions with sizes that must not be too large to be tried.
            needed: Assumptions that the model needs.
        """
        dims = {dim.name: dim for dim in self._undeclared(signature)}
        sizes = signature.sizes(example)
        maxima = _find_maxima(suspects, signature, signature.dims.keys() - self._bounded, dict(example))
        multiples = find_multiples([s.expression for s in needed if s.is_asserted], dims, sizes)
        if maxima.items() <= self._maxima.items() and multiples.items() <= self._multiples.items():
            return False
        self._maxima |= maxima
        self._multiples |= multiples
        return True

    def _end(self, dim: Dim) -> Dim:
        """Returns a dimension that ends at the limit, if that is below its own maximum."""
        maximum = self._maxima.get(dim.name)
        if maximum is None or (dim.max is not None and dim.max <= maximum):
            return dim
        return replace(dim, max=maximum, has_assumed_max=True)

    def _undeclared(self, signature: Signature) -> list[Dim]:
        return [dim for dim in signature.dims.values() if dim.name not in self._declared]


def find_multiples(conditions: Iterable[Any], dims: Mapping[str, Dim], traced: Mapping[str, int]) -> dict[str, int]:
    """Returns numbers that sizes must be multiples of, such as 4 for a U-Net with two levels.

    Args:
        conditions: Conditions that the model needs; see `SuspectSize`.
        dims: The dimensions whose ranges were not declared.
        traced: The traced size of each dimension.
    """
    multiples: dict[str, int] = {}
    for condition in conditions:
        if is_exclusion(condition) and not isinstance(condition.lhs, Mod | PythonMod):
            continue  # it excludes single sizes
        for name in sorted({str(symbol) for symbol in condition.free_symbols} & dims.keys()):
            steps = (step for step in range(1, traced[name] + 1) if traced[name] % step == 0)
            step = next((step for step in steps if _holds_every(step, condition, dims[name], traced)), 1)
            multiples[name] = math.lcm(multiples.get(name, dims[name].multiple_of), step)
    return {name: multiple for name, multiple in multiples.items() if multiple > dims[name].multiple_of}


def _holds_every(step: int, condition: Any, dim: Dim, traced: Mapping[str, int]) -> bool:
    """Returns True if a condition holds at the traced size plus every multiple of a step."""
    sizes = (traced[dim.name] + step * times for times in range(1, _CHECKED_MULTIPLES + 1))
    allowed = [size for size in sizes if size in dim]
    return bool(allowed) and not any(is_broken_at(condition, {**traced, dim.name: size}) for size in allowed)


def _find_maxima(
    suspects: Sequence[SuspectSize], signature: Signature, undeclared: Collection[str], example: Batch
) -> dict[str, int]:
    """Returns limits of undeclared dimensions at which a batch of suspect sizes is small enough to be tried."""
    traced, elements = signature.sizes(example), sum(tensor.numel() for tensor in example.values())
    maxima: dict[str, int] = {}
    for sizes, own in ((sizes, suspect.names) for suspect in suspects for sizes in suspect.sizes):
        smallest = {name: sizes[name] if name in own else signature.dims[name].min for name in sizes}
        growth = math.prod(size / traced[name] for name, size in smallest.items())
        if growth * elements > MAX_TRACED_ELEMENTS and (names := own & {*undeclared}):
            growth /= math.prod(sizes[name] / traced[name] for name in names)
            times = max(1.0, MAX_TRACED_ELEMENTS / 2 / (growth * elements)) ** (1 / len(names))
            for name in names:
                maxima[name] = min(maxima.get(name, LARGEST), int(times * traced[name]))
    return maxima
