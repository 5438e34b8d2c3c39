"""Ways of branches that would raise if they were taken: whole numbers divided by zero, and indexes out of range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.tracing.trace import trace
from tests.exporters import files

Function = Callable[["Protected", torch.Tensor, torch.Tensor], Any]


class Protected(nn.Module):
    """Calls a function of numbers and whole numbers."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.function = function

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> Any:
        return self.function(self, x, k)


def divides(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    return k if (k == 0).any() else 7 // k


def takes_the_remainder(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    return torch.full_like(k, 7) % k if k.abs().min() > 0 else k


def divides_numbers(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    a, b = k.tolist()
    return x * (0 if b == 0 else a // b)


def indexes(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    return x[k] if (k < x.shape[0]).all() and (k >= 0).all() else x[k * 0]


def writes_at_indexes(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    y = x.clone()
    if k.max() < x.shape[0] and k.min() >= 0:
        y[k] = 0
    return y


def embeds(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    if k.max() >= 4 or k.min() < 0:
        return x.mean(0)
    return m.embedding(k).mean(0)


def selects(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    first = k[0].item()
    if 0 <= first < x.shape[0]:
        return x[first]
    return x.mean(0)


def cuts(m: Protected, x: torch.Tensor, k: torch.Tensor) -> Any:
    first = k[0].item()
    if 0 < first <= x.shape[0]:
        return x[:first].amax(0)
    return x.mean(0)


FUNCTIONS = (divides, takes_the_remainder, divides_numbers, indexes, writes_at_indexes, embeds, selects, cuts)


@pytest.mark.sample(3)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_way_that_is_not_taken_does_not_raise(function: Function, tmp_path: Path) -> None:
    model = Protected(function).eval()
    inputs = [
        {"x": torch.randn(rows, 3), "k": torch.tensor(k)}
        for rows, k in ((4, [0, 3]), (2, [3, 0]), (5, [-7, 2]), (3, [9, 1]), (6, [2, 2]))
    ]
    example = {"x": torch.randn(4, 3), "k": torch.tensor([1, 2])}
    files.assert_onnx(model, example, {"x": {0: "rows"}}, tmp_path, *inputs)


def test_division_in_the_way_that_is_taken_still_raises() -> None:
    model = Protected(lambda m, x, k: k if x.sum() > 0 else 7 // k).eval()
    graph = trace(model, {"x": torch.randn(4, 3), "k": torch.tensor([1, 2])}).graph_module
    zero = torch.tensor([0, 2])
    assert torch.equal(graph(torch.ones(4, 3), zero), zero)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        graph(-torch.ones(4, 3), zero)
