"""Modules and tensors may have the name of a method or property of modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexport.tracing.trace import trace
from tests._helpers.exports import BATCH, X, quick, run


class Named(nn.Module):
    """Two linear layers: one with the given name, one with that name and an underscore."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(4, 4))
        setattr(self, f"{name}_", nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.children()
        return second(torch.relu(first(x)))


class Listed(nn.Module):
    """Layers in a Python list, whose weights only a parameter list named ``parameters`` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.parameters = nn.ParameterList(weight for layer in self.layers for weight in layer.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        return second(torch.relu(first(x)))


class Coded(nn.Module):
    """Reads a parameter, a buffer and a module by names that only the modules of torch.fx have."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(4))
        self.register_buffer("meta", torch.randn(4))
        self.graph = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.graph(x + self.meta) * self.code


@pytest.mark.parametrize("name", ["parameters", "type", "code", "graph"])
def test_module_named_like_a_method_is_traced(name: str) -> None:
    model = Named(name).eval()
    names = list(model.state_dict())
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert not traced.is_strict
    modules = [node.target for node in traced.graph_module.graph.nodes if node.op == "call_module"]
    assert modules == [f"{name}__", f"{name}_"]
    x = torch.randn(7, 4)
    assert torch.equal(traced.graph_module(x), model(x))
    assert list(model.state_dict()) == names


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Listed, Coded])
def test_files_of_a_model_with_hidden_names(tmp_path, cls: type[nn.Module]) -> None:
    model = cls().eval()
    formats = ["onnx", "torchscript", "pt2"]
    result = quick(model, {"x": X}, tmp_path / "bundle", formats=formats, dynamic=BATCH)
    x = torch.randn(7, 4)
    for outputs in run(result, x=x).values():
        torch.testing.assert_close(outputs, model(x).detach())
