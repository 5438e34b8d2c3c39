"""Calls that only try a model leave it as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexport.tracing.fallbacks.attempts import returns_own_classes
from optexport.tracing.model_run import run_or_error
from optexport.tracing.script_conversion import converting_scripts


class Counting(nn.Module):
    """Counts its calls, keeps its inputs, and sums them up in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kept: list[torch.Tensor] = []
        self.register_buffer("total", torch.zeros(4))
        self.part = torch.jit.script(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept.append(x)
        self.total += x.sum(0)
        return self.part(x) + torch.rand(4)


@pytest.mark.parametrize("call", [run_or_error, returns_own_classes, converting_scripts])
def test_call_leaves_the_state_and_the_random_numbers_as_they_were(call: object) -> None:
    model, example = Counting(), {"x": torch.randn(3, 4)}
    torch.manual_seed(0)
    if call is converting_scripts:
        with converting_scripts(model, example):
            assert not isinstance(model.part, torch.jit.ScriptModule)
            assert isinstance(model.part(example["x"]), torch.Tensor)
    else:
        call(model, example)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))
    assert (model.calls, model.kept, model.total.tolist()) == (0, [], [0.0] * 4)
