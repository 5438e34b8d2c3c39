"""Models that change their weights in their forward, in the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.errors import TraceError
from tests._helpers.exports import BATCH, X, quick, run


class StoringWeights(nn.Module):
    """Computes the weights of a layer at each call, and stores them in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        self.both.weight.data = self.second.weight.data.clone() @ self.first.weight.data.clone()
        return self.both(x)


class Masking(nn.Module):
    """Applies a mask to a weight in each call, which the first call completes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        first.weight.data *= self.mask
        with torch.no_grad():
            second.weight.mul_(self.mask)
        return second(first(x))


@pytest.mark.parametrize("cls", [StoringWeights, Masking])
def test_weights_that_forward_computes_are_exported(cls: type[nn.Module], tmp_path: Path) -> None:
    model = cls().eval()
    result = quick(model, {"x": X}, tmp_path / "bundle", formats=["onnx", "torchscript"], dynamic=BATCH)
    x = torch.randn(7, 4)
    torch.testing.assert_close(run(result, x=x)["output"], model(x).detach())


class Remembering(nn.Module):
    """Keeps values of its inputs in the data of a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.memory = nn.Parameter(torch.full((4,), 1000.0 if kind == "maximum above all inputs" else 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "before":
            y = x + self.memory
            self.memory.data = x.mean(0)
            return y
        if self.kind.startswith("maximum"):
            self.memory.data = torch.maximum(self.memory.data, x.amax(0))
        elif self.kind == "position":
            self.memory.data[:2] = x[0, :2]
        else:
            self.memory.data += 1
        return torch.where(self.memory > 3, x, 2 * x) if self.kind == "counter" else x + self.memory


@pytest.mark.parametrize("kind", ["before", "maximum", "maximum above all inputs", "position", "counter"])
def test_state_in_the_data_of_a_parameter_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"the outputs depend on what earlier calls wrote to memory"):
        quick(
            Remembering(kind).eval(),
            {"x": X.abs() if kind == "maximum above all inputs" else X},
            tmp_path / "bundle",
            formats=["pt2"],
            dynamic=BATCH,
        )
