"""Finds whole-number inputs whose values index a dynamic dimension, by running the model at other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from optexport.signature.index_values import IndexValues, is_whole, list_ranges
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Signature
from optexport.tracing.shapes.path_probe import is_affordable, outcome

# Several inputs that index one dimension have at most this many combinations of ranges.
_MAX_COMBINATIONS = 16
# Sizes to try. Some models reject the smallest, so there are others that are smaller than the traced one.
_CHANGES: tuple[Callable[[int], int], ...] = (
    lambda size: 1,
    lambda size: size // 2,
    lambda size: size - 1,
    lambda size: 2 * size + 1,
)

Indexes = dict[str, IndexValues]


def find_indexes(
    model: nn.Module, example: Batch, signature: Signature, declared: Mapping[str, Sequence[str]]
) -> Indexes:
    """Returns the inputs whose values must fit a size of another axis, such as lengths and edges.

    A model that fails at another size, and runs there if the values of an input are scaled with the size, shows that
    the values index it. An input whose values suit every size, such as labels, is not among the results.

    Args:
        declared: Dimensions that inputs index, by input. These inputs are fitted in any case.
    """
    search = _Search(model, example, signature)
    indexes: Indexes = {}
    for name, dims in declared.items():
        if dynamic := [dim for dim in dims if dim in signature.dims]:
            indexes[name] = next(list_ranges(example[name], dynamic, search.traced))
            search.improve(indexes, {name: dynamic})
    candidates = {name: dims for name, dims in search.candidates().items() if name not in declared}
    groups = [[dim] for dim in dict.fromkeys(itertools.chain(*candidates.values()))]
    for group in groups if len(groups) < 2 else [*groups, list(itertools.chain(*groups))]:
        inputs = {name: [dim for dim in dims if dim in group] for name, dims in candidates.items()}
        search.improve(indexes, {name: dims for name, dims in inputs.items() if dims})
    return indexes


class _Search:
    """Runs a model at other sizes, with values of its inputs that fit."""

    def __init__(self, model: nn.Module, example: Batch, signature: Signature) -> None:
        self.traced = signature.sizes(example)
        self._model, self._example, self._signature = model, example, signature

    def candidates(self) -> dict[str, list[str]]:
        """Returns the dimensions that the values of each whole-number input may index."""
        candidates: dict[str, list[str]] = {}
        for name, tensor in self._example.items():
            highest = int(tensor.max()) if is_whole(tensor) and tensor.numel() and "mask" not in name else 0
            if 0 < highest <= max(self.traced.values(), default=0):
                candidates[name] = [dim for dim in self.traced if self._signature.dims[dim].min <= highest]
        return {name: dims for name, dims in candidates.items() if dims}

    def improve(self, indexes: Indexes, candidates: Mapping[str, Sequence[str]]) -> None:
        """Adds the ranges to `indexes` with which the model runs at more sizes of the candidates' dimensions."""
        dims = list(dict.fromkeys(itertools.chain(*candidates.values())))
        failing = [sizes for sizes in self._sizes(dims) if not self._runs(sizes, indexes)]
        best: Indexes = {}
        for trial in self._trials(indexes, candidates) if failing else ():
            still_failing = [sizes for sizes in failing if not self._runs(sizes, {**indexes, **trial})]
            if len(still_failing) < len(failing):
                failing, best = still_failing, trial
            if not failing:
                break
        for name in [*best] if len(best) > 1 else []:  # fit no input that need not be fitted
            fewer = {other: index for other, index in best.items() if other != name}
            if all(self._runs(sizes, {**indexes, **fewer}) for sizes in self._sizes(dims) if sizes not in failing):
                best = fewer
        indexes.update(best)

    def _trials(self, indexes: Indexes, candidates: Mapping[str, Sequence[str]]) -> Iterator[Indexes]:
        ranges: dict[str, list[IndexValues]] = {}
        for name, dims in candidates.items():
            known = indexes[name].dims if name in indexes else ()
            all_dims = list(dict.fromkeys([*known, *dims]))
            ranges[name] = list(list_ranges(self._example[name], all_dims, self.traced))
        yield from ({name: index} for name, own in ranges.items() for index in own)
        if len(ranges) > 1:
            combinations = itertools.product(*ranges.values())
            for combination in itertools.islice(combinations, _MAX_COMBINATIONS):
                yield dict(zip(ranges, combination, strict=True))

    def _sizes(self, dims: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yields sizes that change only some dimensions: smaller ones, and one that is larger."""
        for change in _CHANGES:
            changed = {name: change(self.traced[name]) for name in dims}
            limits = {name: self._signature.dims[name] for name in dims}
            inside = {
                name: max(limits[name].min, 1, min(size, limits[name].max or size)) for name, size in changed.items()
            }
            sizes = {**self.traced, **inside}
            if sizes != self.traced and is_affordable(self._example, sizes, self.traced):
                yield sizes

    def _runs(self, sizes: Mapping[str, int], indexes: Indexes) -> bool:
        batch = resize(self._example, replace(self._signature, indexes=indexes), sizes)
        return not isinstance(outcome(self._model, batch), Exception)
