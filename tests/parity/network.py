"""A small network and batches for it, shared by the parity tests."""

from __future__ import annotations

import torch
from torch import nn

from optexport.parity.cases.case import Case
from optexport.signature.signature import Batch
from tests._helpers.models import randomise

Tensors = dict[str, torch.Tensor]
EPS = torch.finfo(torch.float32).eps


def call(model: nn.Module, batch: Batch) -> Tensors:
    return {"y": model(**batch)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def network() -> tuple[nn.Module, list[Case]]:
    model = randomise(Network())
    return model, [Case(f"batch {n}", {"x": torch.randn(n, 6)}) for n in (1, 4, 9)]
