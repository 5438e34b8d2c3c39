"""FuseBatchNorm1dInLinear: before and after a linear with a 2-dimensional input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.utils import parametrizations

from optexport.api import symbolic_trace
from optexport.testing import check_applied, check_laws, check_refused
from optexport.transformations import FuseBatchNorm1dInLinear
from tests._helpers import models
from tests._helpers.graphs import Inherited, Program, by_export, by_fx, calls, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 20).reshape(5, 4)
RULE = FuseBatchNorm1dInLinear()


def _after(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(m.layer(x))


def _before(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.layer(m.norm(x))


ORDERS = pytest.mark.parametrize("body", [_after, _before], ids=["after", "before"])


def _with_ranks(program: nn.Module, x: torch.Tensor) -> GraphModule:
    """Traces a program by ``torch.fx`` and adds the shapes of results."""
    graph_module = graph_of(program)

    class Shapes(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            n.meta["val"] = torch.empty_like(result, device="meta") if isinstance(result, torch.Tensor) else result
            return result

    with torch.no_grad():
        Shapes(graph_module).run(x)
    return graph_module


def test_golden_graph_before_and_after() -> None:
    program = Program(lambda m, x: m.last(m.first(x)), first=nn.Linear(4, 3), last=nn.BatchNorm1d(3))
    graph_module = _with_ranks(randomise(program), X)
    before = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %first : [num_users=1] = call_module[target=first](args = (%x,), kwargs = {})
    %last : [num_users=1] = call_module[target=last](args = (%first,), kwargs = {})
    return last"""
    after = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %first : [num_users=1] = call_module[target=first](args = (%x,), kwargs = {})
    return first"""
    assert str(graph_module.graph) == before
    RULE(graph_module)
    assert str(graph_module.graph) == after
    assert list(graph_module.state_dict()) == ["first.weight", "first.bias"]


@pytest.mark.slow
def test_no_batch_norm_is_left_in_a_groupvit() -> None:
    graph_module = models.traced("groupvit")
    check_applied(RULE, graph_module, models.inputs("groupvit"), count=2)
    assert not calls(check_laws(RULE, graph_module, models.inputs("groupvit")), nn.BatchNorm1d)


@pytest.mark.sample(2)
@ORDERS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_on_either_side_is_folded(body: Any, bias: bool, affine: bool) -> None:
    layers = {"layer": nn.Linear(4, 4, bias=bias), "norm": nn.BatchNorm1d(4, affine=affine)}
    check_applied(RULE, by_export(X, body, **layers), X)


def test_a_norm_before_a_linear_of_another_width_is_folded() -> None:
    check_applied(RULE, by_export(X, _before, layer=nn.Linear(4, 7), norm=nn.BatchNorm1d(4)), X)


def test_norms_on_both_sides_are_folded() -> None:
    graph_module = by_export(
        X,
        lambda m, x: m.last(m.layer(m.first(x))),
        first=nn.BatchNorm1d(4),
        layer=nn.Linear(4, 3),
        last=nn.BatchNorm1d(3),
    )
    check_applied(RULE, graph_module, X, count=2)


def test_norm_between_two_linears_is_folded_into_one_of_them() -> None:
    graph_module = by_export(
        X, lambda m, x: m.b(m.norm(m.a(x))), a=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), b=nn.Linear(3, 2)
    )
    check_applied(RULE, graph_module, X)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_floating_dtype(body: Any, dtype: torch.dtype) -> None:
    program = randomise(Program(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))).to(dtype)
    check_applied(RULE, _with_ranks(program, X.to(dtype)), X.to(dtype), scale=10)


@pytest.mark.sample(1)
@ORDERS
def test_keyword_calls_are_folded(body: Any) -> None:
    def by_keyword(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.norm(input=m.layer(input=x)) if body is _after else m.layer(input=m.norm(input=x))

    program = randomise(Program(by_keyword, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    check_applied(RULE, _with_ranks(program, X), X)


def test_a_transposed_weight_keeps_its_layout() -> None:
    program = randomise(Program(_after, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    program.layer.weight = nn.Parameter(program.layer.weight.detach().t())
    check_laws(RULE, _with_ranks(program, X), X)


@pytest.mark.sample(1)
@ORDERS
def test_a_frozen_linear_stays_frozen(body: Any) -> None:
    layers = {"layer": nn.Linear(4, 4).requires_grad_(False), "norm": nn.BatchNorm1d(4).requires_grad_(False)}
    check_applied(RULE, by_export(X, body, **layers), X)


@pytest.mark.sample(1)
@ORDERS
@pytest.mark.parametrize("channels", [3, 4])
def test_three_dimensions_of_equal_sizes_are_skipped(body: Any, channels: int) -> None:
    x = torch.randn(2, channels, 4)
    graph_module = by_export(x, body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(channels))
    first = "layer" if body is _after else "norm"
    check_refused(RULE, graph_module, x, f"the result of {first} is 3-dimensional")


@ORDERS
def test_an_unknown_rank_is_skipped(body: Any) -> None:
    graph_module = by_fx(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    first = "layer" if body is _after else "norm"
    check_refused(RULE, graph_module, X, f"the result of {first} is of unknown rank")
    check_refused(RULE, graph_module, torch.randn(2, 4, 4), f"the result of {first} is of unknown rank")


@ORDERS
def test_a_first_layer_with_other_users_is_skipped(body: Any) -> None:
    def with_residual(m: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = (m.layer, m.norm) if body is _after else (m.norm, m.layer)
        y = first(x)
        return second(y) + y

    graph_module = by_export(X, with_residual, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    first = "layer" if body is _after else "norm"
    check_refused(RULE, graph_module, X, f"the result of {first} has other users")


@pytest.mark.sample(1)
@ORDERS
def test_a_norm_in_train_mode_is_skipped(body: Any) -> None:
    program = randomise(Program(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    program.norm.train()
    check_refused(RULE, _with_ranks(program, X), X, "norm: the norm is in train mode")


@pytest.mark.sample(1)
@ORDERS
def test_a_norm_without_running_statistics_is_skipped(body: Any) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    program = randomise(Program(body, layer=nn.Linear(4, 4), norm=norm))
    check_refused(RULE, _with_ranks(program, X), X, "norm: the norm has no running statistics")


@pytest.mark.sample(1)
@ORDERS
@pytest.mark.parametrize("name", ["layer", "norm"])
def test_a_layer_that_is_called_twice_is_skipped(body: Any, name: str) -> None:
    graph_module = by_export(
        X, lambda m, x: body(m, x) + getattr(m, name)(x.relu()), layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)
    )
    check_refused(RULE, graph_module, X, f"{name}: the module is called more than once")


@ORDERS
@pytest.mark.parametrize("name", ["layer", "norm"])
def test_a_layer_with_hooks_is_skipped(body: Any, name: str) -> None:
    program = randomise(Program(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    getattr(program, name).register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    check_refused(RULE, _with_ranks(program, X), X, f"{name}: the module has hooks")


@pytest.mark.sample(1)
@ORDERS
def test_subclasses_and_parametrizations_are_skipped(body: Any) -> None:
    program = randomise(Program(body, layer=Inherited(4, 4), norm=nn.BatchNorm1d(4)))
    check_refused(RULE, _with_ranks(program, X), X, "layer: Inherited is a subclass")
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    program = randomise(Program(body, layer=layer, norm=nn.BatchNorm1d(4)))
    check_refused(RULE, _with_ranks(program, X), X, "layer: ParametrizedLinear is a subclass")


@ORDERS
@pytest.mark.parametrize(("layer", "name"), [("layer", "weight"), ("norm", "weight"), ("norm", "bias")])
def test_a_tied_parameter_is_skipped(body: Any, layer: str, name: str) -> None:
    layers = {"layer": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "other": nn.Linear(4, 4)}
    layers["other"].register_parameter("tied", getattr(layers[layer], name))
    program = randomise(Program(lambda m, x: body(m, x) + m.other(x), **layers))
    check_refused(RULE, _with_ranks(program, X), X, f"{layer}: the {name} is tied to other.tied")


@ORDERS
def test_a_layer_under_two_names_is_skipped(body: Any) -> None:
    program = randomise(
        Program(lambda m, x: body(m, x) + m.layer(x.relu()), layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    )
    graph = _with_ranks(program, X).graph
    graph.find_nodes(op="call_module", target="layer")[1].target = "alias"
    program.alias = program.layer
    check_refused(RULE, GraphModule(program, graph), X, "layer: the same module has the names alias and layer")


@ORDERS
def test_mixed_dtypes_are_skipped(body: Any) -> None:
    program = randomise(Program(body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    program.layer.bfloat16()
    graph_module = graph_of(program)
    for node in graph_module.graph.nodes:
        node.meta["val"] = torch.empty(5, 4, device="meta")
    check_refused(RULE, graph_module, None, "norm and layer differ in dtype or device")


def test_a_batch_of_another_size_is_right_after_the_fold() -> None:
    program = randomise(Program(_after, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    graph_module = symbolic_trace(program, example_inputs={"x": X})
    RULE(graph_module)
    for batch in (1, 2, 17):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(graph_module(x), program(x))


@ORDERS
@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[1:].mul_(3), lambda x: torch.relu_(x)])
def test_input_changed_between_the_layers_is_detected(body: Any, change: Any) -> None:
    def changing(m: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = (m.layer, m.norm) if body is _after else (m.norm, m.layer)
        x = x * 2
        y = first(x)
        change(x)
        return second(y) + x

    program = randomise(Program(changing, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    check_laws(RULE, _with_ranks(program, X), X)


def test_other_operations_between_prevent_a_fold() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.norm(m.layer(x).relu())

    graph_module = by_export(X, body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    check_refused(RULE, graph_module, X, "relu lies between layer and norm")
