"""What a node is called says nothing of what it does; what it does inside may be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from optexport import symbolic_trace
from optexport.transformations import FuseAttention, FuseBatchNorm, MergeLinears, ShareEqual, Transformation
from tests.models import randomise
from tests.transformations.programs import Program

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class _Tracer(fx.Tracer):
    """Looks into no module that the test brings, nor into a sequence."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Sequential | fx.GraphModule | _Flips) or super().is_leaf_module(
            m, module_qualified_name
        )


class _Flips(nn.Module):
    def forward(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.flatten(axis).flip(-1)


def agrees(rule: Transformation, body: Callable[..., Any], x: torch.Tensor, **modules: nn.Module) -> None:
    """The rule leaves the results of a graph as they are, whatever it does or refuses."""
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
        found = torch.softmax(t @ (t * 2.0).mT * 0.5, -1) @ (t * 3.0)
        found.ravel().add_(1.0)
        return found * 1

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
def test_a_change_in_place_between_two_calls_is_seen(rule: Transformation, change: Callable[..., Any]) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        a, again = m.a(x), x * 2
        change(m, x)
        return a, m.b(x), again, x * 2

    inside = fx.symbolic_trace(Program(lambda m, x: x.mul_(2.0)))
    agrees(rule, body, X, **linears(), inner=nn.Sequential(nn.ReLU(inplace=True)), graph_inside=inside)


@pytest.mark.parametrize(
    "read",
    [lambda m, a: a * a.stride(0), lambda m, a: a * a.is_contiguous(), lambda m, a: m.clone(a).view(-1)],
    ids=["strides", "is_contiguous", "a module called clone"],
)
def test_results_whose_memory_is_looked_at_are_not_merged(read: Callable[..., Any]) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        a, b = two(m, x)
        return read(m, a), b

    agrees(MergeLinears(), body, X, **linears(), clone=nn.Identity())


def test_a_module_called_flatten_is_none() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return m.layer(m.flatten(m.norm(x), 1))

    x = torch.linspace(-1, 1, 32).reshape(2, 4, 2, 2)
    agrees(FuseBatchNorm(), body, x, norm=nn.BatchNorm2d(4), flatten=_Flips(), layer=nn.Linear(16, 3))
