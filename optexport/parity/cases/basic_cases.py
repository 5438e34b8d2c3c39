"""Cases at the traced sizes, on user data and at sizes that were never traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from optexport.config.schema import Effort
from optexport.errors import TraceError
from optexport.parity.cases.case import Case
from optexport.parity.cases.padding import LESS_PADDING, UNTRACED_PADDING, with_padding
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Dim, Signature

# Limit of elements per generated batch: `_BUDGET`, or `_BUDGET_TIMES` the example's elements if that is more. A batch
# at the end of a range may be larger, because its other sizes are small.
_BUDGET = 8192
_BUDGET_TIMES = 4
_BUDGET_AT_ENDS = 1 << 20
_BUDGET_OF_SUSPECTS = 1 << 24
_MIN_UNTRACED = 3
# Exhaustive effort tries every size up to this one. Above it, it tries powers of two and their neighbors.
_EVERY_SIZE_UP_TO = 16


def make_cases(
    example: Batch,
    user_batches: Sequence[Batch],
    signature: Signature,
    suspect_sizes: Sequence[Mapping[str, int]] = (),
    effort: Effort = "standard",
) -> list[Case]:
    """Returns the cases: the traced batch, user data and at least three untraced sizes.

    There are fewer untraced sizes if the declared ranges contain fewer.

    Args:
        user_batches: Batches of user data.
        suspect_sizes: Sizes at which the trace may not hold. They are always checked.
        effort: "quick" uses the first data batch only and skips the ends of the ranges. "exhaustive" adds many sizes
            and does not reduce large ones.

    Raises:
        TraceError: A suspect size makes every batch too large.
    """
    data = [
        Case("data" if len(user_batches) == 1 else f"data {i}", batch, data=True)
        for i, batch in enumerate(user_batches)
    ]
    data = data[:1] if effort == "quick" else data
    other_data = [case for case in data if not _is_same(case.batch, example)]
    cases = [Case("traced", example, data=len(other_data) < len(data)), *other_data]
    traced = signature.sizes(example)
    budget = max(_BUDGET, _BUDGET_TIMES * sum(tensor.numel() for tensor in example.values()))
    tried = [signature.sizes(case.batch) for case in cases]
    ends, between = _untraced_sizes(signature, traced, effort)
    suspect_limit = math.inf if effort == "exhaustive" else max(budget, _BUDGET_OF_SUSPECTS)
    suspects = [_complete_sizes(sizes, example, signature, suspect_limit) for sizes in suspect_sizes]
    count_before, preferred = len(cases), [*suspects, *ends, *between]
    for index, sizes in enumerate(map(dict, itertools.chain(preferred, _nearby_sizes(signature, traced)))):
        if index >= len(preferred) and len(cases) - count_before >= _MIN_UNTRACED:
            break
        is_end = sizes in ends and any(size == _known_max(signature.dims[name]) for name, size in sizes.items())
        limit = max(budget, _BUDGET_AT_ENDS) if is_end else budget
        is_uncut = effort == "exhaustive" or index < len(suspects)
        sizes = sizes if is_uncut else cut_to(limit, example, signature, sizes)
        if sizes not in tried:
            tried.append(sizes)
            name = ", ".join(f"{dim} {size}" for dim, size in sizes.items())
            batch = resize(example, signature, sizes)
            padded, less_padded = with_padding(batch, UNTRACED_PADDING), with_padding(batch, LESS_PADDING)
            is_padded = any(padded[mask] is not tensor for mask, tensor in batch.items())
            cases.append(Case(name, padded, fallbacks=(less_padded, batch) if is_padded else ()))
    return cases


def _is_same(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def _complete_sizes(suspect: Mapping[str, int], example: Batch, signature: Signature, limit: float) -> dict[str, int]:
    """Returns sizes of all dimensions, and reduces those that are not suspect until the budget is met."""
    sizes = cut_to(limit, example, signature, {**signature.sizes(example), **suspect}, fixed=suspect)
    if (elements := _count_elements(example, signature, sizes)) > limit:
        names, where = " and ".join(suspect), ", ".join(f"{name} {size}" for name, size in suspect.items())
        raise TraceError(
            f"at {where} the model may take another branch than in the trace, but the smallest batch of that size has "
            f"{elements:,} elements, which is too large to try by default",
            location="inputs.dynamic",
            hint=f'Set the maximum of {names} below that, or set parity.effort = "exhaustive" to try it.',
        )
    return sizes


def cut_to(
    limit: float, batch: Batch, signature: Signature, sizes: Mapping[str, int], fixed: Collection[str] = ()
) -> dict[str, int]:
    """Halves dimensions, relatively largest first, until a batch fits into an element limit.

    Args:
        limit: Maximum number of elements in the batch.
        batch: Example that gives the shapes, and the sizes that "largest" is relative to.
        sizes: Size per dimension name.
        fixed: Dimensions that are not reduced.

    Returns:
        The reduced sizes. They exceed the limit if no dimension can shrink further.
    """
    cut, original = dict(sizes), signature.sizes(batch)
    minima = {name: max(signature.dims[name].min, 1) for name in cut}
    while _count_elements(batch, signature, cut) > limit:
        reducible = [name for name in cut if name not in fixed and cut[name] > minima[name]]
        if not reducible:
            break
        largest = max(reducible, key=lambda name: cut[name] / original[name])
        cut[largest] = max(signature.dims[largest].fit(cut[largest] // 2), minima[largest])
    return cut


def _count_elements(batch: Batch, signature: Signature, sizes: Mapping[str, int]) -> int:
    """Returns the number of elements of a batch at other sizes."""
    return sum(map(math.prod, shapes_at(batch, signature, sizes).values()))


def shapes_at(batch: Batch, signature: Signature, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns the shapes of a batch's inputs at other sizes.

    Args:
        sizes: Size per dimension name.
    """
    shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
    for name, axes in signature.sizes_at(sizes).items():
        for axis, size in axes.items():
            shapes[name][axis] = size
    return shapes


def _known_max(dim: Dim) -> int | None:
    return None if dim.has_assumed_max else dim.max


def _untraced_sizes(
    signature: Signature, traced: Mapping[str, int], effort: Effort
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Returns sizes at the ends of the ranges, and other untraced sizes."""
    names = list(traced)
    if not names:
        return [], []

    dims = signature.dims
    smallest = {name: dims[name].fit(1) for name in names}
    prime = {name: dims[name].fit(_prime_multiple(dims[name], traced[name], i)) for i, name in enumerate(names)}
    longer = {name: dims[name].fit(4 * traced[name]) for name in names}
    largest = {name: dims[name].fit(_known_max(dims[name]) or 4 * traced[name]) for name in names}
    first, *rest = names
    if effort == "quick":
        return [], [smallest, prime, {**longer, first: smallest[first]}]
    ends = [smallest, {**largest, first: smallest[first]}, {**smallest, first: largest[first]}]
    if len(rest) > 1:  # a batch with every size at its maximum may have to be reduced
        ends += [{**smallest, name: largest[name]} for name in rest]
    between = [
        prime,
        {**longer, first: smallest[first]},
        {**prime, first: longer[first]},
        {**smallest, first: prime[first]},
        {**smallest, **{name: prime[name] for name in rest}},
    ]
    if effort == "exhaustive":
        between += [
            longer,
            largest,
            *({**smallest, name: size} for name in names for size in _many_sizes(dims[name], traced)),
        ]
    return ends, between


def _many_sizes(dim: Dim, traced: Mapping[str, int]) -> list[int]:
    """Returns sizes at which kernels tend to switch: small ones and near powers of two."""
    maximum = dim.max or 4 * traced[dim.name]
    near_powers = {2**power + step for power in range(maximum.bit_length() + 1) for step in (-1, 0, 1)}
    sizes = {*range(1, _EVERY_SIZE_UP_TO + 1), *near_powers, maximum}
    multiples = {*sizes, *(size * dim.multiple_of for size in sizes)}
    return sorted(size for size in multiples if size in dim and size <= maximum)


def _nearby_sizes(signature: Signature, traced: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields sizes next to the traced ones, for narrow ranges."""
    for step in (1, -1, 2, -2, 3, -3):
        dims = signature.dims
        moved = {name: dims[name].fit(size + step * dims[name].multiple_of) for name, size in traced.items()}
        yield from ({**traced, name: size} for name, size in moved.items())
        yield moved


def _prime_multiple(dim: Dim, traced: int, index: int) -> int:
    return dim.multiple_of * _prime_after(traced // dim.multiple_of + index)


def _prime_after(number: int) -> int:
    candidate = number + 1
    while candidate < 2 or any(candidate % divisor == 0 for divisor in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate
