"""Models that keep results by size are traced for all sizes, and stay as they were."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from optexport.errors import FixedSizeError, UntraceableError
from optexport.signature.signature import Dim, Dynamic
from optexport.tracing.trace import Traced, trace

_DYNAMIC: Dynamic = {"x": {1: Dim("height", 2, 64), 2: Dim("width", 2, 64)}}
_FILE_CACHE: dict[Any, Any] = {}


def grid(height: int, width: int) -> torch.Tensor:
    return torch.arange(height)[:, None] * 10 + torch.arange(width)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[Any, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[1:]
        if (height, width) not in self.cache:
            self.cache[height, width] = grid(height, width)
        return x + self.cache[height, width]


class ByShape(Cached):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = (x.shape[1:], x.device, x.dtype)
        if (found := self.cache.get(key)) is None:
            found = self.cache.setdefault(key, grid(*x.shape[1:]))
        return x + found


class ByWidth(Cached):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[2]
        if width not in self.cache:
            self.cache[width] = torch.arange(width)
        return x + self.cache[width]


class ByFewSizes(Cached):
    """Keeps the two sizes that were used last."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = OrderedDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = tuple(x.shape[1:])
        if key in self.cache:
            self.cache.move_to_end(key)  # type: ignore[attr-defined]
        else:
            self.cache[key] = grid(*key)
            if len(self.cache) > 2:
                self.cache.popitem(last=False)  # type: ignore[call-arg]
        return x + self.cache[key]


class ByClass(Cached):
    grids: ClassVar[dict[Any, Any]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1:] not in self.grids:
            self.grids[x.shape[1:]] = grid(*x.shape[1:])
        return x + self.grids[x.shape[1:]]


class ByFile(Cached):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[1:]
        if (height, width) not in _FILE_CACHE:
            _FILE_CACHE[height, width] = grid(height, width)
        return x + _FILE_CACHE[height, width]


class Grids:
    def __init__(self) -> None:
        self.grids: dict[Any, Any] = {}

    def __call__(self, height: int, width: int) -> torch.Tensor:
        if (height, width) not in self.grids:
            self.grids[height, width] = grid(height, width)
        return self.grids[height, width]  # type: ignore[no-any-return]


class ByObject(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.grids = Grids()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.grids(*x.shape[1:])


def is_equal(traced: Traced, model: nn.Module, height: int, width: int) -> bool:
    x = torch.randn(2, height, width)
    return torch.equal(traced.graph_module(x), model(x))


@pytest.mark.sample(3)
@pytest.mark.parametrize("cls", [Cached, ByShape, ByWidth, ByFewSizes, ByClass, ByFile, ByObject])
def test_results_kept_by_size_are_computed_for_every_size(cls: type[Cached]) -> None:
    model = cls().eval()
    cache = model.cache
    traced = trace(model, {"x": torch.randn(2, 5, 7)}, _DYNAMIC)
    assert model.cache is cache
    assert not model.cache
    for values in (*_FILE_CACHE.values(), *ByClass.grids.values()):
        assert type(values) is torch.Tensor
    assert all(is_equal(traced, model, *size) for size in ((5, 7), (9, 3), (3, 9), (31, 31)))


def test_a_model_that_was_called_before_is_traced_for_other_sizes() -> None:
    model = Cached().eval()
    model(torch.randn(2, 5, 7))
    traced = trace(model, {"x": torch.randn(2, 5, 7)}, _DYNAMIC)
    assert list(model.cache) == [(5, 7)]
    assert all(is_equal(traced, model, *size) for size in ((5, 7), (5, 9), (9, 7)))


def test_stored_values_of_other_sizes_are_tried() -> None:
    model = Cached().eval()
    model.cache[11, 4] = torch.ones(11, 4)  # not what the model would compute
    traced = trace(model, {"x": torch.randn(2, 5, 7)}, _DYNAMIC)
    assert {"height": 11, "width": 4} in [{"width": 7, **sizes} for sizes in traced.suspect_sizes]


class Table(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales.get(x.shape[1], 9.0)

    scales: ClassVar[dict[int, float]] = {7: 1.0, 14: 2.0}


def test_a_table_of_sizes_does_not_lose_its_entries() -> None:
    with pytest.raises(FixedSizeError, match=r"requires height = 7, because of .*scales.get"):
        trace(Table(), {"x": torch.randn(2, 7, 5)}, _DYNAMIC)
    suspects = trace(Table(), {"x": torch.randn(2, 9, 5)}, _DYNAMIC).suspect_sizes
    assert {sizes.get("height") for sizes in suspects} >= {7, 14}


def test_a_size_in_a_set_is_refused() -> None:
    class InSet(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[1] in {7, 14} else x

    with pytest.raises(UntraceableError, match=r"a size of an input in a set, .*at .*in {7, 14}") as caught:
        trace(InSet().eval(), {"x": torch.randn(2, 5, 7)}, _DYNAMIC)
    assert caught.value.hint == (
        "Compare sizes with == instead, or keep results by size in a dict that is an attribute of the model."
    )
