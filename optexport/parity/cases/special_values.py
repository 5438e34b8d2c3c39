"""Cases with special values: padding, boundary ids, zeros, large values.

More kinds were tried and found no additional faults. Equal or constant rows take the same computation as all others.
The normalization of a constant row leaves only rounding, so that correct exports differ there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from optexport.config.inputs import TensorConfig
from optexport.config.schema import Effort
from optexport.parity.cases.case import Case
from optexport.parity.cases.padding import LESS_PADDING, PADDINGS, is_mask, with_padding
from optexport.signature.index_values import is_whole
from optexport.signature.signature import Batch

# Normal values times 64 reach 200: beyond the range of exp in float32 and beyond the clamps of common activations.
_LARGE_TIMES = 64
_LARGE_TIMES_IN_HALF = 8  # float16 ends at 65504
# From here on float32 represents every second integer only; int32 represents all.
_BEYOND_FLOAT32 = 2**24
_KINDS = 5
_SEEDS = 4


def special_cases(
    example: Batch,
    vocabularies: Mapping[str, int],
    effort: Effort,
    seed: int,
    *,
    declared: Mapping[str, TensorConfig] = MappingProxyType({}),
    attention_masks: Collection[str] = (),
    has_value_dependent_sizes: bool = False,
) -> list[Case]:
    """Returns the cases of special values at the traced sizes.

    Args:
        example: The traced batch.
        vocabularies: Number of valid ids per input, for inputs that index an embedding.
        effort: "quick" adds padding and the other value of each flag only. "exhaustive" adds random values and
            negative integers.
        seed: Seed of the random values.
        declared: Tables of inputs with generated values; their range limits the integers.
        attention_masks: Inputs that are added to attention scores, so that a 1 hides nothing.
        has_value_dependent_sizes: True if the size of results depends on input values. Generated integers are then
            skipped, because they could exhaust the memory.
    """
    cases = _padded_cases(example)
    flags = [name for name, tensor in example.items() if _is_flag(name, tensor)]
    cases += [Case(f"{name} negated", {**example, name: ~example[name]}, optional=True) for name in flags]
    if effort == "quick":
        return cases
    if vocabularies:
        ids = {name: _with_boundary_ids(example[name], count) for name, count in vocabularies.items()}
        cases.append(Case("boundary ids", {**example, **ids}, optional=True))
    if values := {name: tensor for name, tensor in example.items() if _is_continuous(name, tensor)}:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
        large = {name: tensor * _scale_factor(tensor.dtype) for name, tensor in values.items()}
        times = max(_scale_factor(tensor.dtype) for tensor in values.values())
        cases.append(Case("zeros", {**example, **zeros}, extreme=True, optional=True))
        cases.append(Case(f"values {times} times as large", {**example, **large}, extreme=True, optional=True))
    for name in [name for name, tensor in values.items() if _is_constant(tensor)]:  # each alone: a model may reject one
        cases.append(
            Case(f"noise as {name}", {**example, name: _draw_near_constant(example[name], seed)}, optional=True)
        )
    for name in [name for name, tensor in example.items() if "mask" in name and tensor.numel()]:
        if all(torch.equal(case.batch[name], example[name]) for case in cases):
            cases += _flipped_masks(example, name, is_added=name in attention_masks)
    if not has_value_dependent_sizes:
        for name in [name for name, tensor in example.items() if _has_free_integers(name, tensor, vocabularies)]:
            cases += _integer_cases(example, name, effort, _integer_range(example[name].dtype, declared.get(name)))
    for name in [
        n for n, tensor in example.items() if tensor.dtype is torch.bool and tensor.numel() and n not in flags
    ]:
        cases += _boolean_cases(example, name)
    for turn in range(_SEEDS if effort == "exhaustive" and (values or vocabularies) else 0):
        drawn = _draw_values(example, [*values], vocabularies, seed + turn)
        cases.append(Case(f"random values {turn}", drawn, optional=True))
    return cases


def _padded_cases(example: Batch) -> list[Case]:
    """Returns the traced batch with every kind of padding, as one case or several.

    Fewer rows than kinds need several cases. With several masks, each mask gets every kind in another order, and no
    padding once.
    """
    cases: list[Case] = []
    rows = max(1, next((tensor.shape[0] for tensor in example.values() if tensor.dim()), 1))
    all_kinds = (*PADDINGS, "none")
    several_masks = sum(is_mask(name, tensor) for name, tensor in example.items()) > 1
    for start in range(0, len(all_kinds) if several_masks else len(PADDINGS), rows):
        kinds = (*all_kinds[start:], *all_kinds[:start])
        padded = with_padding(example, kinds, is_mask)
        if any(is_mask(name, tensor) and not torch.equal(padded[name], tensor) for name, tensor in example.items()):
            row_kinds = ", ".join(kinds[:rows]).removesuffix(", none")
            less_padded = with_padding(example, LESS_PADDING, is_mask)
            cases.append(Case(f"padded {row_kinds}", padded, optional=True, fallbacks=(less_padded,)))
    return cases


def _with_boundary_ids(ids: torch.Tensor, count: int) -> torch.Tensor:
    """Replaces every second id by the first two and last two ids, in turn over the rows.

    A tensor too small to show all of them has every id replaced.
    """
    boundary = torch.tensor(sorted({0, min(1, count - 1), max(0, count - 2), count - 1}), dtype=ids.dtype)
    length = ids.shape[-1] if ids.dim() else 1
    positions = torch.arange(ids.numel())
    row, column = positions // max(1, length), positions % max(1, length)
    rows = ids.numel() // max(1, length)
    every_second = length >= 2 * len(boundary) or (length > 1 and rows >= len(boundary))
    chosen = boundary[(column // 2 + row if every_second else positions) % len(boundary)]
    is_unchanged = (column % 2 == 0) if every_second else torch.zeros_like(positions, dtype=torch.bool)
    return torch.where(is_unchanged, ids.flatten(), chosen).reshape(ids.shape)


def _is_continuous(name: str, tensor: torch.Tensor) -> bool:
    """Returns True if any number is a usual value of an input, unlike in a mask."""
    return tensor.is_floating_point() and "mask" not in name and bool(torch.isfinite(tensor).all())


def _is_flag(name: str, tensor: torch.Tensor) -> bool:
    """Returns True for a single boolean, on which a model may branch in a way that a trace does not see."""
    return tensor.dtype is torch.bool and tensor.numel() == 1 and "mask" not in name


def _is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _flipped_masks(example: Batch, name: str, *, is_added: bool) -> list[Case]:
    """Returns cases of a mask that padding cannot change, with other values in it.

    A mask of zeros and ones has every second value flipped. Zeros in floating point may also be added to attention
    scores, so that the smallest number hides a position. A mask known to be added gets no 1, because torch's encoder
    layer in eval mode treats any nonzero number as hiding. Other constant masks have every second value set to 0. All
    other masks, mostly added ones, are shifted by one position.
    """
    mask = example[name]
    positions = sum(
        torch.arange(size).reshape(-1, *[1] * (mask.dim() - axis - 1)) for axis, size in enumerate(mask.shape)
    )
    every_second = torch.as_tensor(positions).expand(mask.shape) % 2 == (mask.numel() > 1)
    variants: dict[str, torch.Tensor] = {}
    if bool(((mask == 0) | (mask == 1)).all()):
        # Boolean inputs have a case with every second value anyway.
        if not is_added and (mask.dtype is not torch.bool or mask.numel() == 1):
            variants["flipped at every second position"] = torch.where(every_second, 1 - mask.to(torch.int8), mask).to(
                mask.dtype
            )
        if mask.is_floating_point() and not mask.any():
            variants["hiding every second position"] = mask.masked_fill(every_second, torch.finfo(mask.dtype).min)
    elif _is_constant(mask):
        variants["flipped at every second position"] = mask.masked_fill(every_second, 0)
    elif mask.dim():
        variants["shifted by one position"] = mask.roll(1, -1)
    return [
        Case(f"{name} {change}", {**example, name: values}, extreme=True, optional=True)
        for change, values in variants.items()
        if not torch.equal(values, mask)
    ]


def _draw_near_constant(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns values near a constant with its sign, or in [0, 1) for a constant of 0."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return torch.where(tensor == 0, drawn, tensor.double() * (drawn + 0.5)).to(tensor.dtype)


def _has_free_integers(name: str, tensor: torch.Tensor, vocabularies: Mapping[str, int]) -> bool:
    """Returns True if an input contains free integers: neither ids nor the marks of a mask."""
    return is_whole(tensor) and name not in vocabularies and "mask" not in name


def _integer_range(dtype: torch.dtype, declared: TensorConfig | None) -> tuple[int, int]:
    """Returns the smallest and largest integer, limited by the dtype and the declared range."""
    limits = torch.iinfo(dtype)
    low, high = (None, None) if declared is None else (declared.low, declared.high)
    minimum = limits.min if low is None else max(limits.min, math.ceil(low))
    return minimum, limits.max if high is None else min(limits.max, math.ceil(high) - 1)


def _integer_cases(example: Batch, name: str, effort: Effort, limits: tuple[int, int]) -> list[Case]:
    """Returns cases of one input only, because a model may reject any, such as an index."""
    tensor, (minimum, maximum) = example[name], limits
    steps = torch.arange(tensor.numel()).reshape(tensor.shape) % _KINDS
    start = max(minimum, min(_BEYOND_FLOAT32, maximum - _KINDS + 1))
    variants = {f"from {start:,}": start + steps}
    if minimum <= 0 <= maximum:
        variants["zero"] = torch.zeros_like(steps)
    if effort == "exhaustive" and minimum < 0:
        variants["below zero"] = (-1 - steps).clamp(min=minimum)
    inside = {kind: values.clamp(max=maximum).to(tensor.dtype) for kind, values in variants.items()}
    return [
        Case(f"{name} {kind}", {**example, name: values}, extreme=True, optional=True)
        for kind, values in inside.items()
    ]


def _boolean_cases(example: Batch, name: str) -> list[Case]:
    """Returns cases of one boolean input.

    All-false is not a case: a selection without elements is arbitrary, as a softmax over scores of minus infinity.
    """
    tensor = example[name]
    positions = torch.arange(tensor.numel()).reshape(tensor.shape)
    variants = {"every second true": positions % 2 == 0}
    if "mask" not in name:
        variants["all true"] = torch.ones_like(tensor)
    elif tensor.dim() and not tensor.any():  # True may mean padding, which torch's encoder skips at the end
        length = tensor.shape[-1]
        at_the_end = (torch.arange(length) >= (length + 1) // 2).expand(tensor.shape).clone()
        at_the_end[1::2] = False  # no padding in every second row
        variants["true at the end"] = at_the_end
    return [
        Case(f"{name} {kind}", {**example, name: values}, optional=True)
        for kind, values in variants.items()
        if not torch.equal(values, tensor)
    ]


def _scale_factor(dtype: torch.dtype) -> int:
    return _LARGE_TIMES_IN_HALF if dtype is torch.float16 else _LARGE_TIMES


def _draw_values(example: Batch, values: list[str], vocabularies: Mapping[str, int], seed: int) -> Batch:
    """Draws ids from the vocabulary, and normal values with the example's mean and deviation."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = dict(example)
    for name, count in vocabularies.items():
        drawn[name] = torch.randint(0, count, example[name].shape, generator=generator).to(example[name].dtype)
    for name in values:
        values_before = example[name].double()
        noise = torch.randn(values_before.shape, generator=generator, dtype=torch.float64)
        drawn[name] = (values_before.mean() + noise * values_before.std(correction=0)).to(example[name].dtype)
    return drawn
