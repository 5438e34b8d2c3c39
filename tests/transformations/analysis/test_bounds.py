"""Bounds contain every value that a tensor takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from optexport.transformations.analysis.bounds import bounds
from tests._helpers.graphs import by_export, by_fx

X = torch.linspace(-2, 2, 12).reshape(3, 4)
F32 = lambda number: torch.tensor(number).item()  # noqa: E731
MINUS = torch.finfo(torch.float32).min


class Held(nn.Module):
    """A buffer with a fixed value; the parameters of a program are random."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor.detach())


def _found(body: Any, x: torch.Tensor = X, **children: Any) -> Any:
    graph_module = by_export(x, body, **children)
    (result,) = graph_module.graph.output_node().all_input_nodes
    return bounds(graph_module, result), bounds(graph_module, result, first=True)


def _ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], x.shape[0])


@pytest.mark.sample(25)
@pytest.mark.parametrize(
    ("body", "everywhere", "first"),
    [
        (lambda m, x: x * 2, None, None),
        (lambda m, x: x > 0, (0, 1), (0, 1)),
        (lambda m, x: (x > 0).float() * 3 - 1, (-1, 2), (-1, 2)),
        (lambda m, x: (1.0 - (x > 0).float()) * MINUS, (MINUS, 0), (MINUS, 0)),
        (lambda m, x: torch.where(x > 0, torch.zeros_like(x), -math.inf), (-math.inf, 0), (-math.inf, 0)),
        (lambda m, x: (x > 0).float() * math.inf, None, None),
        (lambda m, x: (x > 0).float() * 1e38 * 10, (0, math.inf), (0, math.inf)),
        (lambda m, x: _ones(x).tril() == 0, (0, 1), (0, 0)),
        (lambda m, x: ~_ones(x).bool().tril(), (0, 1), (0, 0)),
        (lambda m, x: _ones(x).tril(-1) == 0, (0, 1), (0, 1)),
        (lambda m, x: _ones(x).triu(1).bool(), (0, 1), (0, 0)),
        (lambda m, x: _ones(x).triu(0).bool(), (0, 1), (0, 1)),
        (lambda m, x: torch.full((x.shape[0], x.shape[0]), -math.inf).triu(1), (-math.inf, 0), (0, 0)),
        (lambda m, x: torch.arange(x.shape[0])[:, None] >= torch.arange(x.shape[0])[None], (0, 1), (1, 1)),
        (lambda m, x: torch.arange(x.shape[0])[:, None] > torch.arange(x.shape[0])[None], (0, 1), (0, 1)),
        (lambda m, x: torch.arange(x.shape[0])[:, None] <= torch.arange(x.shape[0])[None], (0, 1), (0, 1)),
        (lambda m, x: (_ones(x).tril() == 0)[None, :, 1:], (0, 1), (0, 1)),
        (lambda m, x: (_ones(x).tril() == 0).transpose(0, 1), (0, 1), (0, 1)),
        (lambda m, x: (_ones(x).tril() > 0) & (x[:, :3] > 0), (0, 1), (0, 1)),
        (lambda m, x: (_ones(x).tril() > 0) | (x[:, :3] > 0), (0, 1), (1, 1)),
        (lambda m, x: x.long() * 2, (-(2**63), 2**63), (-(2**63), 2**63)),
        (lambda m, x: _ones(x)[:1].long().to(torch.uint8) - 2, (0, 255), (0, 255)),
        (lambda m, x: (_ones(x) * 0.4).long(), (0, 1), (0, 1)),
        (lambda m, x: torch.full((3, 3), 0.1) == 0.1, (0, 1), (0, 1)),
        (lambda m, x: torch.full((3, 3), 0.1) < 0.1, (0, 0), (0, 0)),
        (lambda m, x: torch.full((3, 3), 0.5) == 0.5, (1, 1), (1, 1)),
        (lambda m, x: torch.full((3, 3), 2**24 + 1) == 2.0**24, (0, 1), (0, 1)),
        (lambda m, x: torch.full((3, 3), 2**24 + 1) == 2**24, (0, 0), (0, 0)),
        (lambda m, x: torch.full((3, 3), 0.1) * 0.1 == 0.1 * 0.1, (0, 1), (0, 1)),
        (lambda m, x: torch.tensor(-1e38) * 1, (F32(-1e38), F32(-1e38)), (F32(-1e38), F32(-1e38))),
        (lambda m, x: _ones(x).float().view(torch.int32), (-(2**31), 2**31 - 1), (-(2**31), 2**31 - 1)),
    ],
)
def test_bounds_of_operations(body: Any, everywhere: Any, first: Any) -> None:
    assert _found(body) == (everywhere, first)


@pytest.mark.slow
def test_constant_has_the_bounds_of_its_values() -> None:
    table = nn.Parameter(torch.tensor([[0.0, 1.0], [0.5, -math.inf]]))
    assert _found(lambda m, x: m.table.tensor + 1, table=Held(table)) == ((-math.inf, 2), (1, 1.5))
    assert _found(lambda m, x: m.table.tensor + 1, table=Held(table * math.nan)) == (None, None)


@pytest.mark.slow
def test_tensor_changed_in_place_has_no_bounds() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(x)
        zeros.add_(x)
        return zeros * 1

    assert _found(body) == (None, None)


def test_graph_without_shapes_has_no_bounds() -> None:
    graph_module = by_fx(lambda m, x: torch.zeros(3))
    assert bounds(graph_module, graph_module.graph.output_node()) is None
    assert all(bounds(graph_module, node) is None for node in graph_module.graph.nodes)


@pytest.mark.slow
def test_deep_graph_has_no_bounds() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for _ in range(200):
            y = y + y
        return y

    assert _found(body) == (None, None)
