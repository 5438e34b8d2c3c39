"""Sizes at which a graph and the model part, found by running both at as many as are cheap.

Most of what a model asks of its sizes is seen while it is traced. A size that becomes a text, a key, or a number of
NumPy's leaves no condition behind, and only running tells: ``self.heads[str(x.shape[1])]``. So it is of a rule that is
wrong at some sizes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from optexport.parity import distances
from optexport.parity.cases import is_padding_mask, shapes_at, with_padding
from optexport.runtime.runners import Run
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Dim, Signature

# What it may cost: so many runs, and so many operations of arithmetic; a call of an operator, and an element that one
# writes, count as many as are done in that time.
_MOST_RUNS = 1024
_MOST_OPERATIONS = 4e10
_OPERATIONS_PER_CALL = 2e5
_OPERATIONS_PER_ELEMENT = 20
_TIMES_HALF = 4
# What takes more than this share of it is left out.
_MOST_OF_ONE = 1 / 16
# Of one dimension, and of a range that nobody ended as often as the traced size.
_MOST_SIZES = 512
_TIMES_TRACED = 4
_DRAWN = 64
# One set of sizes shows a way; a few show that there are several. Those that part the farthest: of half precision more
# part by rounding.
_ENOUGH = 4
# The same operators give next to the same; what results differ by in truth is for the proof to tell. Of whole numbers
# that share may hang on a last bit where a rule computes in another order, and is tried with other values.
# Where terms cancel, a value is rounded as others are: as one of the smallest quarter, since more may be no results.
_TOLERANCE = 1e-4
_SMALL = 4
_TIES = 1 / 8
_ULPS = 4
_PADDING = ("right", "none", "left")


def parting_sizes(
    original: Run,
    graph: Run,
    example: Batch,
    signature: Signature,
    known: Sequence[Mapping[str, int]] = (),
    times: int = 1,
    *,
    rounded_anew: bool = False,
) -> list[dict[str, int]]:
    """Sizes at which the original and a graph of it give something else, or the graph gives nothing; a few at most.

    What is tried depends on the model and its ranges alone, and on no clock.

    Args:
        original, graph: How to run them.
        known: Sizes, of some dimensions, that the proof tries anyway.
        times: How many times as much may be tried.
        rounded_anew: Whether the graph computes in another order.
    """
    found: list[tuple[float, dict[str, int]]] = []
    left, cost, before = _MOST_OPERATIONS * times, 0.0, math.inf
    to_try = itertools.islice(_to_try(signature.dims, signature.sizes(example)), _MOST_RUNS * times)
    numbers = {tuple(sizes.items()): _numbers(example, signature, sizes) for sizes in to_try}
    for items in sorted(numbers, key=numbers.__getitem__):  # the cheapest first: of these the most are tried
        sizes = dict(items)
        if any(doubt.items() <= sizes.items() for doubt in known):
            continue
        if cost * numbers[items] / before > _MOST_OF_ONE * _MOST_OPERATIONS:
            break  # of a model that compares all with all the next is next to as dear, too
        batch = with_padding(resize(example, signature, sizes), _PADDING)
        want = _outcome(original, batch)
        with _Counter() as counted:
            got = _outcome(graph, batch)
        apart = _apart(got, want)
        if 0 < apart <= 1 and rounded_anew:  # of other values it is others that hang on a last bit
            batch = _other_values(batch)
            apart *= _apart(_outcome(graph, batch), _outcome(original, batch)) > 0
        if apart:
            found.append((apart, sizes))
        cost, before = counted.operations, max(1, numbers[items])
        left -= 2 * (counted.operations + _OPERATIONS_PER_CALL * counted.calls)
        if left < 0:
            break
    return [sizes for _, sizes in sorted(found, key=lambda each: each[0], reverse=True)[:_ENOUGH]]


def _to_try(dims: Mapping[str, Dim], traced: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Each dimension at all of its sizes, with the others at their least and as traced; all alike; and some of any."""
    if not traced:
        return
    ranges = {name: _range(dims[name], size) for name, size in traced.items()}
    least = {name: sizes[0] for name, sizes in ranges.items()}
    alone = [
        [{**others, name: size} for size in ranges[name]]
        for others in (least, traced)
        for name in (ranges if len(ranges) > 1 or others is least else ())
    ]
    alike = [
        {name: min(max(size, sizes[0]), sizes[-1]) for name, sizes in ranges.items()}
        for size in sorted(set().union(*ranges.values()))
    ]
    few = [dict(zip(ranges, each, strict=True)) for each in itertools.product(*(s[:3] for s in ranges.values()))]
    drawn = random.Random(0)  # noqa: S311
    any_of = [{name: drawn.choice(sizes) for name, sizes in ranges.items()} for _ in range(_DRAWN)]
    seen = {tuple(traced.values())}
    for sizes in itertools.chain.from_iterable(itertools.zip_longest(*alone, alike, few, any_of)):
        if sizes is not None and (key := tuple(sizes.values())) not in seen:
            seen.add(key)
            yield sizes


def _range(dim: Dim, traced: int) -> Sequence[int]:
    most = max(dim.max or _TIMES_TRACED * traced, traced)
    return range(max(dim.min, 1), min(most, _MOST_SIZES) + 1) or [traced]


class _Counter(TorchDispatchMode):
    """Counts operators that are called, and the operations of arithmetic that they do, writing their elements too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.calls = 0.0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        elements = sum(value.numel() for value in made)
        is_half = any(value.dtype in (torch.float16, torch.bfloat16) for value in made)
        self.calls += 1
        operations = _OPERATIONS_PER_ELEMENT * elements
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            operations += count(*args, **(kwargs or {}), out_val=result)
        self.operations += operations * (_TIMES_HALF if is_half else 1)
        return result


def _outcome(run: Run, batch: Batch) -> Mapping[str, torch.Tensor] | None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return run(batch)
    except Exception:  # a model's own code may raise anything
        return None


def _apart(got: Mapping[str, torch.Tensor] | None, want: Mapping[str, torch.Tensor] | None) -> float:
    """How many times as far two results are apart as rounding has them; up to 1 where it may yet be ties, 0 where not.

    What the original does not take may be whatever it is.
    """
    if want is None:
        return 0.0
    return math.inf if got is None else max((_times(got[name], each) for name, each in want.items()), default=0.0)


def _times(one: torch.Tensor, other: torch.Tensor) -> float:
    if distances.why_incomparable(one, other) is not None:
        return math.inf
    apart, magnitude = distances.distance(one, other), distances.finite(other).abs()
    if not other.is_floating_point() or not other.numel():
        return float(apart.count_nonzero()) / (_TIES * max(1, apart.numel()))
    tolerance = max(_TOLERANCE, _ULPS * torch.finfo(other.dtype).eps)
    results = magnitude[~distances.marks(other, other)]
    small = results.kthvalue(1 + results.numel() // _SMALL).values if results.numel() else 0.0
    times = distances.largest(torch.where(apart > 0, apart / (tolerance * (magnitude + small)), 0.0))
    return times if times > 1 else 0.0


def _other_values(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor if is_padding_mask(name, tensor) else _others(tensor, generator) for name, tensor in batch.items()
    }


def _others(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensor + noise * distances.finite(tensor).abs().mean()
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)


def _numbers(example: Batch, signature: Signature, sizes: Mapping[str, int]) -> int:
    return max(map(math.prod, shapes_at(example, signature, sizes).values()), default=0)
