"""Models that change ``weight.data`` in their forward are traced with the new values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from optexport.tracing.trace import trace

Forward = Callable[["Layers", torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward
        self.first, self.second, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def masked(m: Layers, x: torch.Tensor) -> torch.Tensor:
    m.first.weight.data *= m.mask
    return m.first(x)


def normalized(m: Layers, x: torch.Tensor) -> torch.Tensor:
    m.first.weight.data = functional.normalize(m.first.weight.data, dim=1)
    return m.first(x)


def written(m: Layers, x: torch.Tensor) -> torch.Tensor:
    m.first.weight.data.copy_(m.second.weight.data.abs())
    m.first.bias.data.clamp_(min=0)
    return m.first(x)


def shared(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Two weights become the same new tensor, and a third one that tensor transposed."""
    weight = m.first.weight.data
    weight /= weight.norm()
    m.second.weight.data = weight.t()
    return m.second(m.first(x)) + weight[0]


def first_row(m: Layers, x: torch.Tensor) -> torch.Tensor:
    m.table.weight.data[0] = 0
    return x + m.table(torch.arange(2)).sum(0)


def computed_from_inputs(m: Layers, x: torch.Tensor) -> torch.Tensor:
    m.first.bias.data = x.mean(0)
    return m.first(x)


def intermediate(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.first(x)
    y.data[:, 0] = 7
    return y + m.second(x).data


@pytest.mark.parametrize(
    "forward", [masked, normalized, written, shared, first_row, computed_from_inputs, intermediate]
)
def test_changed_data_is_read_afterwards(forward: Forward) -> None:
    model = Layers(forward).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert not traced.is_strict
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    x = torch.randn(7, 4)
    result = traced.graph_module(x)
    torch.testing.assert_close(result, model(x))


def test_a_weight_whose_data_is_only_read_stays_a_weight() -> None:
    model = Layers(lambda m, x: m.first(x.to(m.first.weight.data.dtype)) * m.first.weight.data.max()).eval()
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert "first" in [node.target for node in traced.graph_module.graph.nodes if node.op == "call_module"]
