"""Search for sizes at which a graph differs from the model, by running both at many.

Tracing records most conditions on sizes. A size that becomes a text, a key or a NumPy number leaves no condition, and
only a run shows it: ``self.heads[str(x.shape[1])]``. The same applies to a rule that is wrong at some sizes.
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

from optexport._utils import torch_settings
from optexport.parity import distances
from optexport.parity.cases.basic_cases import shapes_at
from optexport.parity.cases.padding import is_padding_mask, with_padding
from optexport.runtime.runners import Run
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Dim, Signature

# Cost limits: number of runs, and number of arithmetic operations. Operator calls and written elements are converted to
# operations by the time they take.
_MAX_RUNS = 1024
_MAX_OPERATIONS = 4e10
_OPERATIONS_PER_CALL = 2e5
_OPERATIONS_PER_ELEMENT = 20
_TIMES_HALF = 4
# A run that takes more than this share of the limit is skipped.
_MAX_SHARE_OF_ONE = 1 / 16
# Limits of the range of one dimension: number of sizes, and multiple of the traced size if the range has no end.
_MAX_SIZES = 512
_TIMES_TRACED = 4
_DRAWN = 64
# Number of sizes to return, largest difference first. One set of sizes shows a difference, and a few show that there
# are several. In half precision rounding causes more differences, so the largest are the most reliable.
_MAX_RESULTS = 4
# Relative tolerance. Equal operators give nearly equal results, and the parity check measures the exact difference.
_TOLERANCE = 1e-4
# The tolerance is at least this many times the machine epsilon, which counts in half precision.
_ULPS = 4
# Differences are relative to at least the lower quartile of magnitudes; a higher quantile could be a mask value.
_SMALL = 4
# Share of integers that may differ by a last bit if a rule changes the order of operations. These sizes run again with
# other values.
_TIES = 1 / 8
_PADDING = ("right", "none", "left")


@torch_settings.threads(1)  # threads of small runs wait for each other, longest on a busy machine
def find_differing_sizes(
    original: Run,
    graph: Run,
    example: Batch,
    signature: Signature,
    skipped: Sequence[Mapping[str, int]] = (),
    times: int = 1,
    *,
    reordered: bool = False,
) -> list[dict[str, int]]:
    """Returns a few sizes at which a graph raises or differs from the original.

    The tried sizes depend only on the model and its ranges, not on time, so the search is deterministic.

    Args:
        original, graph: Runners of the model and of the graph.
        skipped: Sizes of some dimensions that are checked anyway.
        times: Factor on the cost limits.
        reordered: True if the graph computes in another order than the model.
    """
    differences: list[tuple[float, dict[str, int]]] = []
    budget, cost, elements_before = _MAX_OPERATIONS * times, 0.0, math.inf
    to_try = itertools.islice(_list_sizes(signature.dims, signature.sizes(example)), _MAX_RUNS * times)
    elements = {tuple(sizes.items()): _largest_input(example, signature, sizes) for sizes in to_try}
    # cheapest first, so that most sizes fit into the cost limit
    for items in sorted(elements, key=elements.__getitem__):
        sizes = dict(items)
        if any(skipped_sizes.items() <= sizes.items() for skipped_sizes in skipped):
            continue
        if cost * elements[items] / elements_before > _MAX_SHARE_OF_ONE * _MAX_OPERATIONS:
            break  # cost grows with size, so that every further size exceeds the limit too
        batch = with_padding(resize(example, signature, sizes), _PADDING)
        expected = _outcome(original, batch)
        with _Counter() as counter:
            outputs = _outcome(graph, batch)
        difference = _difference(outputs, expected)
        if 0 < difference <= 1 and reordered:  # with other values, other integers depend on a last bit
            batch = _other_values(batch)
            if not _difference(_outcome(graph, batch), _outcome(original, batch)):
                difference = 0
        if difference:
            differences.append((difference, sizes))
        cost, elements_before = counter.operations, max(1, elements[items])
        budget -= 2 * (counter.operations + _OPERATIONS_PER_CALL * counter.calls)
        if budget < 0:
            break
    return [sizes for _, sizes in sorted(differences, key=lambda entry: entry[0], reverse=True)[:_MAX_RESULTS]]


def _list_sizes(dims: Mapping[str, Dim], traced: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields sizes to try: one dimension varied, all equal, few small ones, random ones."""
    if not traced:
        return
    ranges = {name: _range(dims[name], size) for name, size in traced.items()}
    minima = {name: sizes[0] for name, sizes in ranges.items()}
    one_varied = [
        [{**fixed, name: size} for size in ranges[name]]
        for fixed in (minima, traced)
        for name in (ranges if len(ranges) > 1 or fixed is minima else ())
    ]
    all_equal = [
        {name: dims[name].fit(min(max(size, sizes[0]), sizes[-1])) for name, sizes in ranges.items()}
        for size in sorted(set().union(*ranges.values()))
    ]
    smallest = [
        dict(zip(ranges, combination, strict=True))
        for combination in itertools.product(*(s[:3] for s in ranges.values()))
    ]
    generator = random.Random(0)  # noqa: S311
    random_sizes = [{name: generator.choice(sizes) for name, sizes in ranges.items()} for _ in range(_DRAWN)]
    yielded = {tuple(traced.values())}
    for sizes in itertools.chain.from_iterable(itertools.zip_longest(*one_varied, all_equal, smallest, random_sizes)):
        if sizes is not None and (key := tuple(sizes.values())) not in yielded:
            yielded.add(key)
            yield sizes


def _range(dim: Dim, traced: int) -> Sequence[int]:
    maximum = max(dim.max or _TIMES_TRACED * traced, traced)
    return range(max(dim.min, dim.multiple_of), min(maximum, _MAX_SIZES) + 1, dim.multiple_of) or [traced]


class _Counter(TorchDispatchMode):
    """Mode that counts operator calls and arithmetic operations, including element writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.calls = 0.0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        elements = sum(value.numel() for value in tensors)
        is_half = any(value.dtype in (torch.float16, torch.bfloat16) for value in tensors)
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
    except Exception:  # model code may raise anything
        return None


def _difference(outputs: Mapping[str, torch.Tensor] | None, expected: Mapping[str, torch.Tensor] | None) -> float:
    """Returns the difference of two results as a multiple of the expected rounding.

    0 means equal, and up to 1 means that ties can explain it. Any result is acceptable if the original raises.
    """
    if expected is None:
        return 0.0
    if outputs is None:
        return math.inf
    return max((_relative_difference(outputs[name], tensor) for name, tensor in expected.items()), default=0.0)


def _relative_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    if distances.find_comparison_problem(output, expected) is not None:
        return math.inf
    distance, magnitude = distances.distance(output, expected), distances.finite(expected).abs()
    if not expected.is_floating_point() or not expected.numel():
        return float(distance.count_nonzero()) / (_TIES * max(1, distance.numel()))
    tolerance = max(_TOLERANCE, _ULPS * torch.finfo(expected.dtype).eps)
    results = magnitude[~distances.is_mask_value(expected, expected)]
    small = results.kthvalue(1 + results.numel() // _SMALL).values if results.numel() else 0.0
    times = distances.largest(torch.where(distance > 0, distance / (tolerance * (magnitude + small)), 0.0))
    return times if times > 1 else 0.0


def _other_values(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor if is_padding_mask(name, tensor) else _draw_other_values(tensor, generator)
        for name, tensor in batch.items()
    }


def _draw_other_values(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensor + noise * distances.finite(tensor).abs().mean()
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)


def _largest_input(example: Batch, signature: Signature, sizes: Mapping[str, int]) -> int:
    return max(map(math.prod, shapes_at(example, signature, sizes).values()), default=0)
