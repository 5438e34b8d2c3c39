"""The effects of a node do not depend on its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from optexport import symbolic_trace
from optexport.testing import check_applied
from optexport.transformations import (
    FuseAttention,
    FuseBatchNorm,
    MergeLinears,
    ShareEqual,
    Transformation,
)
from optexport.transformations.analysis import modules as modules_of_graphs
from tests._helpers.graphs import Program, leaves
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class _Tracer(fx.Tracer):
    """A tracer with the modules of the test, and Sequential, as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Sequential | fx.GraphModule | _Flips) or super().is_leaf_module(
            m, module_qualified_name
        )


class _Flips(nn.Module):
    def forward(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.flatten(axis).flip(-1)


def agrees(rule: Transformation, body: Callable[..., Any], x: torch.Tensor, **modules: nn.Module) -> None:
    """Asserts that a rule keeps the outputs of a graph."""
    model = randomise(Program(body, **modules)).eval()
    graph_module = fx.GraphModule(model, _Tracer().trace(model))
    with torch.no_grad():
        before = graph_module(x.clone())
        after = rule(graph_module)(x.clone())
    torch.testing.assert_close(after, before)


def two(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return m.a(x), m.b(x)


def linears() -> dict[str, nn.Module]:
    return {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


WRITES: dict[str, Callable[..., Any]] = {
    "ravel": lambda m, a: a.ravel().add_(1.0),
    "torch.ravel": lambda m, a: torch.ravel(a).add_(1.0),
    "reshape_as": lambda m, a: a.reshape_as(torch.zeros(12)).add_(1.0),
    "a flattening module": lambda m, a: m.flat(a).add_(1.0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_of_a_merged_result_is_not_lost(name: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        a, b = two(m, x)
        WRITES[name](m, a)
        return a * 1, b

    agrees(MergeLinears(), body, X, **linears(), flat=nn.Flatten(0))


def test_a_write_through_a_view_of_attention_is_not_lost() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        t = x.transpose(1, 2)
        attended = torch.softmax(t @ (t * 2.0).mT * 0.5, -1) @ (t * 3.0)
        attended.ravel().add_(1.0)
        return attended * 1

    x = torch.linspace(-1, 1, 256).reshape(1, 2, 8, 16)
    graph_module = symbolic_trace(Program(body), example_inputs=(x,), dynamic={})
    with torch.no_grad():
        before = graph_module(x)
        torch.testing.assert_close(FuseAttention()(graph_module)(x), before)


@pytest.mark.parametrize("rule", [MergeLinears(), ShareEqual()], ids=["merge-linears", "share-equal"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m, x: nn.init.constant_(tensor=x, val=3.0),
        lambda m, x: m.inner(x),
        lambda m, x: m.graph_inside(x),
    ],
    ids=["by keyword", "inside a sequence", "inside a graph"],
)
def test_change_in_place_between_two_calls_is_detected(rule: Transformation, change: Callable[..., Any]) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        a, again = m.a(x), x * 2
        change(m, x)
        return a, m.b(x), again, x * 2

    inside = fx.symbolic_trace(Program(lambda m, x: x.mul_(2.0)))
    agrees(rule, body, X, **linears(), inner=nn.Sequential(nn.ReLU(inplace=True)), graph_inside=inside)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "read",
    [lambda m, a: a * a.stride(0), lambda m, a: a * a.is_contiguous(), lambda m, a: m.clone(a).view(-1)],
    ids=["strides", "is_contiguous", "a module called clone"],
)
def test_results_with_inspected_memory_are_not_merged(read: Callable[..., Any]) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        a, b = two(m, x)
        return read(m, a), b

    agrees(MergeLinears(), body, X, **linears(), clone=nn.Identity())


def test_module_called_flatten_is_not_treated_as_flatten() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return m.layer(m.flatten(m.norm(x), 1))

    x = torch.linspace(-1, 1, 32).reshape(2, 4, 2, 2)
    agrees(FuseBatchNorm(), body, x, norm=nn.BatchNorm2d(4), flatten=_Flips(), layer=nn.Linear(16, 3))


def flattened(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2.0)


@torch.library.custom_op("optexport_names::flattened", mutates_args=())
def flattened_operator(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).clone()


class _Calls(nn.Module):
    """A module that calls a function; as a leaf, it hides the function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


class _Opaque(nn.Identity):
    """A subclass of a layer with another forward."""

    forward = _Calls.forward

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function


def hooked(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    layer = nn.Identity()
    layer.register_forward_pre_hook(lambda module, args: function(args[0]))
    return layer


def replaced(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    layer = nn.Identity()
    layer.forward = function  # type: ignore[method-assign]
    return layer


def _call(function: Any, x: Any) -> Any:
    """Calls a function as one node, as ``torch.fx.wrap`` does."""
    return x.tracer.create_proxy("call_function", function, (x,), {})


FOREIGN: dict[str, Callable[[Any], tuple[Callable[..., Any], dict[str, nn.Module]]]] = {
    "a wrapped function": lambda f: (lambda m, x: _call(f, x), {}),
    "a leaf": lambda f: (lambda m, x: m.leaf(x), {"leaf": _Calls(f)}),
    "a leaf in a sequence": lambda f: (lambda m, x: m.leaf(x), {"leaf": nn.Sequential(_Calls(f))}),
    "a subclass": lambda f: (lambda m, x: m.leaf(x), {"leaf": _Opaque(f)}),
    "a hook": lambda f: (lambda m, x: m.leaf(x), {"leaf": hooked(f)}),
    "another forward": lambda f: (lambda m, x: m.leaf(x), {"leaf": replaced(f)}),
    "a graph": lambda f: (lambda m, x: m.leaf(x), {"leaf": fx.symbolic_trace(_Calls(f))}),
    "a scripted module": lambda f: (lambda m, x: m.leaf(x), {"leaf": torch.jit.script(_Calls(f))}),
}


def stays(rule: Transformation, body: Callable[..., Any], **modules: nn.Module) -> None:
    """Asserts that a rule changes nothing in a graph whose modules are leaves."""
    graph_module = leaves(randomise(Program(body, **modules)).eval())
    code = graph_module.code
    with torch.no_grad():
        before = graph_module(X.clone())
        assert rule(graph_module).code == code
        torch.testing.assert_close(graph_module(X.clone()), before)


@pytest.mark.parametrize("how", FOREIGN)
def test_foreign_code_may_view_its_arguments_in_any_shape(how: str) -> None:
    call, modules = FOREIGN[how](flattened)
    stays(MergeLinears(), lambda m, x: (call(m, m.a(x)), m.b(x)), **linears(), **modules)
    stays(MergeLinears(), lambda m, x: (call(m, m.a(x).unsqueeze(0)), m.b(x)), **linears(), **modules)


@pytest.mark.parametrize("how", FOREIGN)
def test_foreign_code_may_change_its_arguments(how: str) -> None:
    call, modules = FOREIGN[how](doubled)

    def body(m: Any, x: Any) -> Any:
        a = m.a(x)
        call(m, x.view(4, 3))
        return a, m.b(x)

    stays(MergeLinears(), body, **linears(), **modules)


@pytest.mark.sample(7)
@pytest.mark.parametrize("how", FOREIGN)
def test_foreign_code_may_change_its_arguments_with_its_result(how: str) -> None:
    call, modules = FOREIGN[how](flattened)

    def body(m: Any, x: Any) -> Any:
        y = m.norm(x)
        call(m, y).mul_(2.0)
        return m.a(x), y, m.b(x)

    agrees(FuseBatchNorm(), body, X, **linears(), norm=nn.BatchNorm1d(4), **modules)
    stays(ShareEqual(), lambda m, x: (m.a(x), call(m, m.a(x))), **linears(), **modules)


@pytest.mark.parametrize("overload", ["default", None])
def test_foreign_operators_may_need_contiguous_memory(overload: str | None) -> None:
    packet = torch.ops.optexport_names.flattened
    function = getattr(packet, overload) if overload else packet
    stays(MergeLinears(), lambda m, x: (_call(function, m.a(x)), m.b(x)), **linears())


def test_code_of_pytorch_is_not_foreign_code() -> None:
    def body(m: Any, x: Any) -> Any:
        y = F.layer_norm(torch.relu(m.drop(m.a(x))), (4,))
        z = m.many(m.b(x)).softmax(-1)
        return y + m.a(m.drop(x)), torch.einsum("ij,kj->ik", y, z), m.attention(z, z, z)[0], m.c(x), m.c(x)

    many = nn.Sequential(nn.GELU(), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)))
    children = {"c": nn.Linear(4, 4), "drop": nn.Dropout(), "many": many, "attention": nn.MultiheadAttention(4, 2)}
    graph_module = leaves(randomise(Program(body, **linears(), **children)).eval())
    assert not any(modules_of_graphs.is_foreign(graph_module, node) for node in graph_module.graph.nodes)


def test_linears_next_to_foreign_code_are_merged() -> None:
    def body(m: Any, x: Any) -> Any:
        return _call(doubled, m.a(x) + 1), m.b(x)

    graph_module = leaves(randomise(Program(body, **linears())))
    check_applied(MergeLinears(), graph_module, X)
