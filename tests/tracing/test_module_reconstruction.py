"""Reconstruction: ATen calls become modules and operators again, and stay bit-exact."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from optexport.api import export, symbolic_trace
from optexport.signature.signature import Dim
from optexport.testing import outputs
from optexport.tracing.module_reconstruction import reconstruct_modules
from optexport.tracing.trace import trace
from tests._helpers import models
from tests._helpers.graphs import Program, calls
from tests._helpers.models import randomise

_LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "Linear": (lambda: nn.Linear(4, 3), torch.randn(5, 4)),
    "Linear without bias": (lambda: nn.Linear(4, 3, bias=False), torch.randn(2, 5, 4)),
    "Linear of one row": (lambda: nn.Linear(4, 1), torch.randn(4)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), torch.randn(2, 4, 9)),
    "Conv1d same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), torch.randn(2, 4, 9)),
    "Conv1d valid": (lambda: nn.Conv1d(4, 6, 3, padding="valid", bias=False), torch.randn(2, 4, 9)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1)), torch.randn(2, 4, 8, 9)),
    "Conv2d same": (lambda: nn.Conv2d(4, 4, 3, padding="same", dilation=2, groups=4), torch.randn(2, 4, 8, 9)),
    "Conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), torch.randn(2, 4, 8, 9)),
    "Conv2d of one image": (lambda: nn.Conv2d(4, 6, 3), torch.randn(4, 8, 9)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 1, 2), padding=(0, 1, 0)), torch.randn(2, 2, 4, 5, 6)),
    "Conv3d same": (lambda: nn.Conv3d(2, 4, 3, padding="same", bias=False), torch.randn(2, 2, 4, 5, 6)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), torch.randn(5, 4)),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(4, eps=1e-2), torch.randn(5, 4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4, momentum=None), torch.randn(2, 4, 3, 3)),
    "BatchNorm2d without affine": (lambda: nn.BatchNorm2d(4, affine=False), torch.randn(2, 4, 3, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), torch.randn(2, 4, 3, 3, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(4), torch.randn(2, 3, 4)),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((3, 4), eps=1e-3), torch.randn(2, 3, 4)),
    "LayerNorm without affine": (lambda: nn.LayerNorm(4, elementwise_affine=False), torch.randn(2, 3, 4)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias=False), torch.randn(2, 3, 4)),
    "Embedding": (lambda: nn.Embedding(9, 4), torch.tensor([[1, 8, 0], [2, 2, 3]])),
    "Embedding with padding": (lambda: nn.Embedding(9, 4, padding_idx=2), torch.tensor([[1, 8, 0], [2, 2, 3]])),
    "Embedding with padding from the end": (lambda: nn.Embedding(9, 4, padding_idx=-1), torch.tensor([1, 8])),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", _LAYERS)
def test_layer_keeps_its_name_and_is_bit_exact(name: str) -> None:
    make, x = _LAYERS[name]
    model = randomise(Program(lambda m, x: m.outer[0](x), outer=nn.Sequential(make())))
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    layer = model.outer[0]
    (call,) = calls(graph_module, type(layer))
    assert call.target == "outer.0"
    raised = graph_module.get_submodule("outer.0")
    assert type(raised) is type(layer)
    assert not raised.training
    for key, parameter in layer.named_parameters():
        assert getattr(raised, key) is parameter
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "BatchNorm2d", "LayerNorm"])
def test_layers_of_every_floating_dtype_are_reconstructed(name: str, dtype: torch.dtype) -> None:
    make, x = _LAYERS[name]
    model = randomise(Program(lambda m, x: m.layer(x), layer=make())).to(dtype)
    graph_module = symbolic_trace(model, example_inputs={"x": x.to(dtype)})
    assert graph_module.graph.find_nodes(op="call_module")
    assert torch.equal(outputs(graph_module, x.to(dtype))[0], outputs(model, x.to(dtype))[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 2), nn.Embedding(7, 3)])
def test_integer_layers_are_reconstructed(layer: Any) -> None:
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter((parameter * 9).long(), requires_grad=False))
    x = torch.arange(24).reshape(2, 4, 3) % 7
    x = x.mT.contiguous() if isinstance(layer, nn.Linear) else x
    model = Program(lambda m, x: m.layer(x), layer=layer).eval()
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert graph_module.graph.find_nodes(op="call_module")
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


_ARITHMETIC: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "add": (lambda x: x + 2, operator.add),
    "add of tensors": (lambda x: x + x.exp(), operator.add),
    "sub": (lambda x: x - x.exp(), operator.sub),
    "mul": (lambda x: x * 0.3, operator.mul),
    "div": (lambda x: x / 3, operator.truediv),
    "torch.div": (lambda x: torch.div(x, 49.0), operator.truediv),
    "div of tensors": (lambda x: x / x.exp(), operator.truediv),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", _ARITHMETIC)
def test_tensor_arithmetic_becomes_operators_and_is_bit_exact(name: str) -> None:
    body, target = _ARITHMETIC[name]
    x = torch.randn(50, 7)
    model = Program(lambda _, x: body(x))
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert len(graph_module.graph.find_nodes(op="call_function", target=target)) == 1
    assert torch.equal(outputs(graph_module, x)[0], body(x))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.div(x, 3, rounding_mode="floor"),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.sub(x, 1, alpha=3),
        lambda x: 3 - x,
        lambda x: x.clone().div_(7),
        lambda x: x.clone().add_(x, alpha=0.1),
    ],
)
def test_arithmetic_with_options_keeps_them(body: Callable[[Any], Any]) -> None:
    x = torch.randn(50, 7)
    graph_module = symbolic_trace(Program(lambda _, x: body(x)), example_inputs={"x": x})
    assert torch.equal(outputs(graph_module, x)[0], body(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_bit_exact_at_untraced_sizes(name: str) -> None:
    model, graph_module = models.model(name), models.traced(name)
    inputs = models.inputs(name)
    options = {"use_cache": False} if name in ("bart", "llama", "t5") else {}
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(**inputs, **options))
    expected = [value for value in leaves if isinstance(value, torch.Tensor)]
    got = outputs(graph_module, inputs)
    assert len(got) == len(expected)
    assert all(torch.equal(one, batch) for one, batch in zip(got, expected, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", models.NAMES)
def test_every_layer_of_a_model_is_reconstructed(name: str) -> None:
    kinds = ("linear", "conv2d", "batch_norm", "layer_norm", "embedding")
    targets = [str(node.target) for node in models.traced(name).graph.nodes]
    assert not [target for target in targets if target.startswith(tuple(f"aten.{kind}." for kind in kinds))]


def test_module_called_twice_is_one_module_with_two_calls() -> None:
    x = torch.randn(3, 4)
    model = randomise(Program(lambda m, x: m.layer(m.norm(m.layer(x))), layer=nn.Linear(4, 4), norm=nn.LayerNorm(4)))
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert [call.target for call in calls(graph_module, nn.Linear)] == ["layer", "layer"]
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


def test_module_under_two_names_is_reconstructed_once() -> None:
    x = torch.randn(3, 4)
    shared = nn.Linear(4, 4)
    model = randomise(Program(lambda m, x: m.b(m.a(x)), a=shared, b=shared))
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert len({id(graph_module.get_submodule(call.target).weight) for call in calls(graph_module, nn.Linear)}) == 1
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


@pytest.mark.parametrize("first", ["embed", "head"])
def test_tied_weight_belongs_to_the_module_that_made_the_call(first: str) -> None:
    parts: dict[str, nn.Module] = {"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 9)}
    parts["head"].weight = parts["embed"].weight
    model = randomise(Program(lambda m, x: m.head(m.embed(x)), **dict(sorted(parts.items(), reverse=first == "head"))))
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert [call.target for call in calls(graph_module, nn.Embedding)] == ["embed"]
    assert [call.target for call in calls(graph_module, nn.Linear)] == ["head"]
    assert graph_module.embed.weight is graph_module.head.weight is model.embed.weight
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


def test_parameters_are_shared_with_the_model() -> None:
    graph_module, model = models.traced("bert"), models.model("bert")
    own = dict(model.named_parameters())
    raised = dict(graph_module.named_parameters())
    assert raised.keys() == own.keys()
    assert all(raised[name] is own[name] for name in own)


def test_state_dict_keeps_the_order_of_the_model() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.a(m.b(m.c(x) * m.scale) + m.shift)

    parts = {"a": nn.Linear(4, 4), "c": nn.LayerNorm(4), "b": nn.Linear(4, 4), "scale": nn.Parameter(torch.ones(4))}
    model = Program(body, **parts)
    model.register_buffer("shift", torch.ones(4))
    graph_module = symbolic_trace(model, example_inputs={"x": torch.randn(3, 4)})
    assert list(graph_module.state_dict()) == list(model.state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", models.NAMES)
def test_state_dict_omits_tensors_that_the_model_does_not_save(name: str) -> None:
    own = models.model(name).state_dict()
    extra = [key for key in models.traced(name).state_dict() if key not in own and "lifted_tensor" not in key]
    assert not extra


class _Adapted(nn.Linear):
    """A low-rank adapter: the subclass makes the base call, its children the others."""

    def __init__(self, own_first: bool) -> None:
        super().__init__(4, 4)
        self.down, self.up, self.own_first = nn.Linear(4, 2), nn.Linear(2, 4), own_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own_first:
            return super().forward(x) + self.up(self.down(x))
        return self.up(self.down(x)) + super().forward(x)


class _Scaled(nn.Linear):
    """A scaled layer: the subclass has one more tensor than its layer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__(4, 4)
        if buffer:
            self.register_buffer("scale", torch.tensor(2.5))
        else:
            self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class _Twice(nn.Linear):
    """Two calls of one operator with different weights in one module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(super().forward(x), self.weight.t())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: _Adapted(own_first=True),
        lambda: _Adapted(own_first=False),
        lambda: _Scaled(buffer=True),
        lambda: _Scaled(buffer=False),
        lambda: _Twice(4, 4),
    ],
    ids=["adapted, own call first", "adapted, children first", "scaled by a buffer", "scaled by a parameter", "twice"],
)
def test_subclasses_that_extend_a_layer_compute_the_same(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(3, 4)
    model = randomise(Program(lambda m, x: m.layer(x), layer=make()))
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


def test_hooks_and_parametrizations_are_computed() -> None:
    x = torch.randn(3, 4)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = Program(lambda m, x: m.a(x) - m.b(x), a=nn.Linear(4, 4), b=normed)
    model.a.register_forward_hook(lambda module, args, result: result * 2)
    graph_module = symbolic_trace(randomise(model), example_inputs={"x": x})
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element:UserWarning:torch.nn.modules.linear")
def test_layer_without_features_is_accepted() -> None:
    x = torch.randn(3, 4)
    model = randomise(Program(lambda m, x: m.layer(x), layer=nn.Linear(4, 0)))
    assert outputs(symbolic_trace(model, example_inputs={"x": x}), x)[0].shape == (3, 0)


def test_computed_weight_stays_an_aten_call() -> None:
    x = torch.randn(3, 4)
    model = randomise(Program(lambda m, x: F.linear(x, m.layer.weight * 2) + m.layer(x), layer=nn.Linear(4, 4)))
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert len(calls(graph_module, nn.Linear)) == 1
    assert graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert torch.equal(outputs(graph_module, x)[0], outputs(model, x)[0])


def test_norm_in_train_mode_stays_an_aten_call() -> None:
    x = torch.randn(3, 4)
    model = Program(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(4)).train()
    graph_module = symbolic_trace(model, example_inputs={"x": x})
    assert not calls(graph_module, nn.BatchNorm1d)


def test_reconstruction_does_not_change_the_program() -> None:
    model = randomise(Program(lambda m, x: m.layer(x) / 3, layer=nn.Linear(4, 4)))
    program = torch.export.export(model, (torch.randn(3, 4),))
    text, metas = str(program.graph), [dict(node.meta) for node in program.graph.nodes]
    reconstruct_modules(program)
    assert str(program.graph) == text
    assert [dict(node.meta) for node in program.graph.nodes] == metas


def _in_part(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        y = m.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            z = y + 1
        return y, z


def _for_all(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(True)
    return torch.relu(m.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [_in_part, _for_all])
def test_values_computed_with_gradients_go_into_every_file(forward: Any, tmp_path: Path) -> None:
    """torch.onnx failed with an index that is out of range."""
    model, x = Program(forward, linear=nn.Linear(4, 4)).eval(), torch.randn(3, 4)
    result = export(model, {"x": x}, tmp_path / "out", dynamic={"x": {0: Dim("batch", 1, 8)}})
    assert result.passed
    graph = trace(model, {"x": x}).graph_module.graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_module"] == ["linear"]
