"""Finds whole-number inputs whose values index a dynamic dimension, by running the model at other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from optexport._utils import model_memory
from optexport.signature.index_values import IndexValues, is_whole, list_ranges
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Signature
from optexport.tracing.model_run import run_or_error
from optexport.tracing.shapes.path_probe import is_affordable

# Several inputs that index one dimension have at most this many combinations of ranges.
_MAX_COMBINATIONS = 16
# In bytes of weights. A run of a larger model is slow; its indexes have to be declared.
MAX_WEIGHT_BYTES = 1 << 30
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
    for name, dims in declared.items():
        dynamic = [dim for dim in dims if dim in signature.dims]
        if dynamic and name in example:  # a fallback may have made the input a constant
            search.indexes[name] = next(list_ranges(example[name], dynamic, search.traced))
    indexed = {name: list(index.dims) for name, index in search.indexes.items()}
    is_small = model_memory.weight_bytes(model) < MAX_WEIGHT_BYTES
    search.improve(indexed, _find_candidates(example, signature, declared) if is_small else {})
    return search.indexes


def _find_candidates(example: Batch, signature: Signature, declared: Container[str]) -> dict[str, list[str]]:
    """Returns the dimensions that the values of each undeclared whole-number input may index."""
    traced = signature.sizes(example)
    candidates: dict[str, list[str]] = {}
    for name, tensor in example.items():
        if is_whole(tensor) and tensor.numel() and "mask" not in name and name not in declared:
            highest = int(tensor.max())
            if 0 < highest <= max(traced.values(), default=0):
                total = int(tensor.sum())
                dims = [dim for dim in traced if signature.dims[dim].min <= highest or traced[dim] == total]
                candidates[name] = dims
    return {name: dims for name, dims in candidates.items() if dims}


class _Search:
    """Runs a model at other sizes, with values of its inputs that fit.

    Attributes:
        indexes: The result.
        traced: Size of each dimension in the example.
    """

    def __init__(self, model: nn.Module, example: Batch, signature: Signature) -> None:
        self.indexes: Indexes = {}
        self.traced = signature.sizes(example)
        self._model, self._example, self._signature = model, example, signature

    def improve(self, declared: Mapping[str, Sequence[str]], candidates: Mapping[str, Sequence[str]]) -> None:
        """Adds ranges with which the model runs at more sizes; none that it runs without.

        Args:
            declared: Dimensions that inputs index; only their ranges are tried.
            candidates: Dimensions that the values of other inputs may index.
        """
        dims = list(dict.fromkeys(itertools.chain(*declared.values(), *candidates.values())))
        groups = [[dim] for dim in dims] + [dims] * (len(dims) > 1)
        sizes_by_group = [self._sizes(group) for group in groups]
        self._all_sizes = [sizes for group_sizes in sizes_by_group for sizes in group_sizes]
        running = self._running(self.indexes)
        for group, group_sizes in zip(groups, sizes_by_group, strict=True):
            tried = {name: [dim for dim in own if dim in group] for name, own in candidates.items()}
            for trial in self._trials({**declared, **{name: own for name, own in tried.items() if own}}):
                if all(map(running.__contains__, group_sizes)):
                    break
                running = self._replace_if_better({**self.indexes, **trial}, running, group_sizes)
        for name in candidates:
            for dim in candidates[name]:
                self._remove_if_needless(name, dim, running)

    def _running(self, indexes: Indexes) -> list[dict[str, int]]:
        """Returns the sizes at which the model runs."""
        return [sizes for sizes in self._all_sizes if self._runs(sizes, indexes)]

    def _replace_if_better(
        self, indexes: Indexes, running: list[dict[str, int]], group_sizes: Sequence[dict[str, int]]
    ) -> list[dict[str, int]]:
        """Takes new ranges if the model then runs at a further size of a group, and at all sizes as before.

        Returns:
            The sizes at which the model runs.
        """
        if not any(sizes not in running and self._runs(sizes, indexes) for sizes in group_sizes):
            return running
        now_running = self._running(indexes)
        if any(sizes not in now_running for sizes in running):
            return running
        self.indexes = indexes
        return now_running

    def _remove_if_needless(self, name: str, dim: str, running: Sequence[dict[str, int]]) -> None:
        if name not in self.indexes:
            return
        index = self.indexes[name]
        fewer = {other: self.indexes[other] for other in self.indexes if other != name}
        if dims := tuple(other for other in index.dims if other != dim):
            fewer[name] = replace(index, dims=dims)
        if all(self._runs(sizes, fewer) for sizes in running):
            self.indexes = fewer

    def _trials(self, inputs: Mapping[str, Sequence[str]]) -> Iterator[Indexes]:
        """Yields ranges for one input, then for all, in addition to the dimensions that they index already."""
        ranges: dict[str, list[IndexValues]] = {}
        for name, dims in inputs.items():
            known = self.indexes[name].dims if name in self.indexes else ()
            all_dims = list(dict.fromkeys([*known, *dims]))
            ranges[name] = list(list_ranges(self._example[name], all_dims, self.traced))
        yield from ({name: index} for name, own in ranges.items() for index in own)
        if len(ranges) > 1:
            combinations = itertools.product(*ranges.values())
            for combination in itertools.islice(combinations, _MAX_COMBINATIONS):
                yield dict(zip(ranges, combination, strict=True))

    def _sizes(self, dims: Sequence[str]) -> list[dict[str, int]]:
        """Returns sizes that change only some dimensions: smaller ones, and one that is larger."""
        all_sizes: list[dict[str, int]] = []
        for change in _CHANGES:
            changed = {name: change(self.traced[name]) for name in dims}
            limits = {name: self._signature.dims[name] for name in dims}
            inside = {name: max(limits[name].fit(size), 1) for name, size in changed.items()}
            sizes = {**self.traced, **inside}
            if sizes not in (self.traced, *all_sizes) and is_affordable(self._example, sizes, self.traced):
                all_sizes.append(sizes)
        return all_sizes

    def _runs(self, sizes: Mapping[str, int], indexes: Indexes) -> bool:
        batch = resize(self._example, replace(self._signature, indexes=indexes), sizes)
        return not isinstance(run_or_error(self._model, batch), Exception)
