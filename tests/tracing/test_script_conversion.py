"""TorchScript programs within a model are traced at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import export
from optexport.exporters import targets
from optexport.tracing.trace import trace
from tests._helpers.models import randomise

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu().reshape(x.shape[0], 2, 2).sum(-1)


class Pair(nn.Module):
    """Has a norm with buffers, an optional argument, and returns a tuple with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor, factor: float = 2.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.norm(x) * self.scale
        return y, {"double": y * factor}


@torch.jit.script
def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    for i in range(times):
        x = x * 2 + float(i)
    return x.reshape(x.shape[0], 4)


class Parent(nn.Module):
    def __init__(self, compile_: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), compile_(randomise(Child())))
        self.pair = torch.jit.script(randomise(Pair()))
        self.unused = torch.jit.script(Child())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.pair(x)
        _, other = self.pair(repeated(x, 2), factor=3.0)
        return torch.cat([self.layers(x), first, other["double"]], 1)


def _traced_by_torch(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.randn(3, 4))


def _frozen(module: nn.Module) -> Any:
    return torch.jit.freeze(torch.jit.script(module.eval()))


@pytest.mark.parametrize(
    "compile_",
    [torch.jit.script, *(pytest.param(function, marks=pytest.mark.slow) for function in (_traced_by_torch, _frozen))],
)
def test_model_with_compiled_parts_is_traced_for_any_size(compile_: Any) -> None:
    model = Parent(compile_).eval()
    parts = [model.layers[1], model.pair]
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "batch"}})
    assert [model.layers[1], model.pair] == parts
    for size in (1, 2, 7):
        x = torch.randn(size, 4)
        with torch.no_grad():
            torch.testing.assert_close(traced.graph_module(x), model(x))


@pytest.mark.slow
def test_files_of_a_model_with_compiled_parts_are_right(tmp_path: Path) -> None:
    model = Parent(torch.jit.script).eval()
    result = export(model, {"x": torch.randn(3, 4)}, tmp_path / "bundle", dynamic={"x": {0: "batch"}}, effort="quick")
    for size in (1, 7):
        x = torch.randn(size, 4)
        want = model(x).detach()
        for file_format, path in result.files.items():
            for _, run in targets.open_file(path, file_format, ["output"]):
                torch.testing.assert_close(run({"x": x})["output"], want)
