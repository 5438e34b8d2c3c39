"""Modules and tensors may have the name of a method or property of modules."""

from __future__ import annotations

import copy

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


class Worded(nn.Module):
    """Has names that are Python keywords, or that need quotes and escapes in Python code."""

    def __init__(self) -> None:
        super().__init__()
        words = ("in", "class", "1", "a-b", "two words", "ünï", 'quo"te', "back\\slash", "li\nne", "in_")
        self.layers = nn.ModuleDict({word: nn.Linear(4, 4) for word in words})
        self.scales = nn.ParameterDict({"lambda": nn.Parameter(torch.randn(4)), "is": nn.Parameter(torch.randn(4))})
        self.register_buffer("from", torch.randn(4))
        self.add_module("None", nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            x = layer(x) * self.scales["lambda" if name in ("in", "in_") else "is"]
        return getattr(self, "None")(x) + getattr(self, "from")


class ReadsItself(nn.Module):
    """Reads a member of its own that has the name of a method."""

    @property
    def half(self) -> nn.Module:
        return self._modules["half"]  # type: ignore[return-value]

    def __init__(self) -> None:
        super().__init__()
        self._modules["half"] = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(x)


@pytest.mark.parametrize("cls", [Worded, ReadsItself])
def test_names_that_code_cannot_contain_are_traced(cls: type[nn.Module]) -> None:
    model = cls().eval()
    names = list(model.state_dict())
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert not traced.is_strict
    x = torch.randn(7, 4)
    assert torch.equal(traced.graph_module(x), model(x))
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(traced.graph_module)
    copied.recompile()
    assert torch.equal(copied(x), model(x))


def test_names_of_keywords_get_an_underscore() -> None:
    traced = trace(Worded().eval(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    names = {node.target for node in traced.graph_module.graph.nodes if node.op == "call_module"}
    assert {
        "layers.in__",
        "layers.in_",
        "layers.class_",
        "layers.1",
        "layers.two words",
        "layers._n__",
        "layers.quo_te_",
    } <= names


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
@pytest.mark.parametrize("cls", [Listed, Coded, Worded])
def test_files_of_a_model_with_hidden_names(tmp_path, cls: type[nn.Module]) -> None:
    model = cls().eval()
    formats = ["onnx", "torchscript", "pt2"]
    result = quick(model, {"x": X}, tmp_path / "bundle", formats=formats, dynamic=BATCH)
    x = torch.randn(7, 4)
    for outputs in run(result, x=x).values():
        torch.testing.assert_close(outputs, model(x).detach())
