"""An in-place change of a tensor is found under all its names; reading a size is not a view."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from optexport import symbolic_trace
from optexport.testing import assert_same, copy_sharing_modules
from optexport.transformations import FuseBatchNorm2dInConv2d, FuseBias, MergeLinears, Rule
from optexport.transformations.analysis import effects, memory, modules
from optexport.transformations.analysis.modules import operator_name
from optexport.transformations.rule import run
from tests._helpers.graphs import Program, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 12).reshape(3, 4)


def _traced(how: str, model: nn.Module, x: torch.Tensor = X) -> GraphModule:
    return graph_of(model) if how == "fx" else symbolic_trace(model, example_inputs={"x": x})


def _reasons(rule: Rule, original: GraphModule) -> list[str]:
    _, report = run(rule, copy_sharing_modules(original))
    assert not report.changes
    return [miss.reason for miss in report.near_misses]


def _statistics() -> nn.Module:
    holder = nn.Module()
    holder.register_buffer("mean", torch.randn(4))
    holder.register_buffer("var", torch.rand(4))
    return holder


@pytest.mark.sample(5)
@pytest.mark.parametrize("trace", ["fx", "export"])
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: F.batch_norm(x, m.own.mean, m.own.var, training=True) + (m.layer(x) + m.own.mean),
        lambda m, x: (
            torch.batch_norm(x, None, None, m.own.mean, m.own.var, True, 0.1, 1e-5, False) + (m.layer(x) + m.own.mean)
        ),
        lambda m, x: (
            F.instance_norm(x[:, :, None].expand(3, 4, 2) * 1.0, m.own.mean, m.own.var)[..., 0]
            + (m.layer(x) + m.own.mean)
        ),
        lambda m, x: (m.layer(x) + m.norm.running_mean) + m.norm(x),
    ],
)
def test_updated_statistics_are_not_constants(body: Any, trace: str) -> None:
    model = randomise(Program(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), own=_statistics())).train()
    assert not _reasons(FuseBias(), _traced(trace, model))


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_read_only_statistics_are_constants(trace: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, m.own.mean, m.own.var) + (m.layer(x) + m.own.mean) + m.norm(x)

    model = randomise(Program(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), own=_statistics()))
    _, report = run(FuseBias(), copy_sharing_modules(_traced(trace, model)))
    assert len(report.changes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["fx", "export"])
def test_weight_changed_under_another_name_stays(trace: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.alias.w.mul_(x.mean())
        return m.one(x) * m.two(x)

    model, alias = randomise(Program(body, one=nn.Linear(4, 4), two=nn.Linear(4, 4))), nn.Module()
    alias.register_buffer("w", model.one.weight.data)
    model.alias = alias
    assert _reasons(MergeLinears(), _traced(trace, model)) == ["one: the weight is changed in place by mul_"]


@pytest.mark.slow
def test_statistic_changed_under_another_name_stays() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.alias.w.mul_(x.mean())
        return m.norm(m.conv(x))

    model, alias = randomise(Program(body, conv=nn.Conv2d(2, 3, 1), norm=nn.BatchNorm2d(3))), nn.Module()
    alias.register_buffer("w", model.norm.running_mean.data)
    model.alias = alias
    (reason,) = _reasons(FuseBatchNorm2dInConv2d(), graph_of(model))
    assert reason == "norm: the running_mean is changed in place by mul_"


def test_a_nested_layer_changes_its_own_state() -> None:
    layers = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4)), nn.Embedding(3, 4, max_norm=1.0), nn.BatchNorm1d(4).eval())
    graph = fx.Graph()
    graph.output(graph.call_module("whole", (graph.placeholder("x"),)))
    (call,) = graph.find_nodes(op="call_module")
    holder = nn.Module()
    holder.whole = layers
    changed = effects.mutated_state(GraphModule(holder, graph), call)
    assert [id(tensor) for tensor in changed] == [id(t) for t in (*layers[0][0].buffers(), layers[1].weight)]


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_sizes_share_no_memory(trace: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] if trace == "export" else x.size(0)
        y, z = (x * 2).view(rows, 2, 2), (x * 3).view(rows * 2, 2)
        z.add_(x.size()[0] + 1)
        return y.flatten() + z.flatten()

    original = _traced(trace, Program(body))
    views = [node for node in original.graph.nodes if modules.operator_name(node) == "view"]
    assert [memory.changed_in_place(original, view) for view in views] == [False, True]
    assert [len(memory.aliased_inputs(original, view)) for view in views] == [1, 1]


def test_getattr_result_is_a_view_unless_it_is_a_size() -> None:
    original = graph_of(Program(lambda m, x: x.T.view(x.shape[0], operator.mul(x.ndim, 2))))
    read = {
        node.args[1]: memory.aliased_inputs(original, node) for node in original.graph.nodes if node.target is getattr
    }
    assert {name: len(inputs) for name, inputs in read.items()} == {"T": 1, "shape": 0, "ndim": 0}


def test_a_custom_operator_is_not_mistaken_for_one_of_pytorch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    own, foreign = graph.call_function(torch.relu, (x,)), graph.call_function(torch.ops.optexport_memory.relu, (x,))
    assert operator_name(own) == "relu"
    assert operator_name(foreign) != "relu"


@torch.library.custom_op("optexport_memory::relu", mutates_args=())
def relu(x: torch.Tensor) -> torch.Tensor:
    return -x


@pytest.mark.slow
def test_a_method_of_a_foreign_object_may_change_its_arguments() -> None:
    class Bumps:
        def bump(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1.0)

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, bumps):  # type: ignore[no-untyped-def]
            h = x * 2
            return self.a(h), bumps.bump(h), self.b(h)

    original = torch.fx.symbolic_trace(Given())
    want = original(X, Bumps())
    _, report = run(MergeLinears(), original)
    assert ["is changed in place by bump" in near.reason for near in report.near_misses] == [True]
    assert_same([*original(X, Bumps())], [*want], "outputs")
