"""FuseBiasInLinear converts the bias to a column of the weight, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from optexport.errors import TransformationError
from optexport.testing import check_applied, check_refused, check_undo_alone, graph_state, outputs
from optexport.transformations import FuseBatchNorm1dInLinear, FuseBiasInLinear, MergeLinears
from tests._helpers import models
from tests._helpers.graphs import Inherited, Program, by_export, by_fx, calls, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


def _call(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x)


def test_golden_graph_before_and_after() -> None:
    graph_module = by_fx(lambda m, x: m.layer(x).relu(), layer=nn.Linear(4, 2))
    before = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %layer : [num_users=1] = call_module[target=layer](args = (%x,), kwargs = {})
    %relu : [num_users=1] = call_method[target=relu](args = (%layer,), kwargs = {})
    return relu"""
    after = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %pad : [num_users=1] = call_function[target=torch.nn.functional.pad](args = (%x, (0, 1)), kwargs = {value: 1.0})
    %layer : [num_users=1] = call_module[target=layer](args = (%pad,), kwargs = {})
    %relu : [num_users=1] = call_method[target=relu](args = (%layer,), kwargs = {})
    return relu"""
    assert str(graph_module.graph) == before
    FuseBiasInLinear()(graph_module)
    assert str(graph_module.graph).replace("torch._C._nn.pad", "torch.nn.functional.pad") == after
    FuseBiasInLinear()(graph_module, reverse=True)
    assert str(graph_module.graph) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bert", "groupvit"])
def test_no_linear_with_a_bias_is_left(name: str) -> None:
    graph_module = models.traced(name)
    biased = [n for n in calls(graph_module, nn.Linear) if graph_module.get_submodule(n.target).bias is not None]
    check_applied(FuseBiasInLinear(), graph_module, models.inputs(name), count=len(biased))


def test_linear_without_a_bias_is_ignored() -> None:
    check_refused(FuseBiasInLinear(), by_fx(_call, layer=nn.Linear(4, 2, bias=False)), X)
    check_refused(FuseBiasInLinear(), by_fx(_call, layer=nn.LayerNorm(4)), X)


def test_a_linear_that_is_called_twice_is_changed_once() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.layer(m.layer(x).relu())

    report = check_applied(FuseBiasInLinear(), by_fx(body, layer=nn.Linear(4, 4)), X)
    assert len(report.changes[0].nodes) == 2


def test_keyword_calls_come_back_as_keyword_calls() -> None:
    check_applied(FuseBiasInLinear(), by_fx(lambda m, x: m.layer(input=x), layer=nn.Linear(4, 2)), X)


@pytest.mark.parametrize(("inputs", "width"), [(4, 1), (1, 4), (1, 1)])
def test_single_features(inputs: int, width: int) -> None:
    check_applied(FuseBiasInLinear(), by_fx(_call, layer=nn.Linear(inputs, width)), torch.randn(3, inputs))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("inputs", "width"), [(4, 0), (0, 4)])
def test_no_features_at_all(inputs: int, width: int) -> None:
    check_applied(FuseBiasInLinear(), by_fx(_call, layer=nn.Linear(inputs, width)), torch.randn(3, inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_floating_dtype(dtype: torch.dtype) -> None:
    check_applied(FuseBiasInLinear(), by_fx(_call, layer=nn.Linear(4, 3)).to(dtype), X.to(dtype))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 1, 3, 4), (0, 4)])
def test_inputs_of_every_rank(shape: tuple[int, ...]) -> None:
    check_applied(FuseBiasInLinear(), by_fx(_call, layer=nn.Linear(4, 3)), torch.randn(shape))


def test_a_linear_below_containers() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), nn.Linear(2, 2))
    check_applied(FuseBiasInLinear(), graph_of(randomise(model)), X, count=2)


def test_a_frozen_linear_stays_frozen() -> None:
    check_applied(FuseBiasInLinear(), by_fx(_call, layer=nn.Linear(4, 3).requires_grad_(False)), X)


def test_a_change_of_the_input_afterwards_changes_nothing() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = m.layer(x)
        return y.sum() + x.mul_(3)

    check_applied(FuseBiasInLinear(), by_fx(body, layer=nn.Linear(4, 3)), X)


def test_a_result_may_be_viewed_in_any_shape() -> None:
    check_applied(FuseBiasInLinear(), by_fx(lambda m, x: m.layer(x).view(-1), layer=nn.Linear(4, 3)), X)


def test_undo_restores_the_memory_layout_or_the_rule_skips() -> None:
    program = randomise(Program(_call, layer=nn.Linear(4, 4)))
    program.layer.weight = nn.Parameter(program.layer.weight.detach().t())
    graph_module = graph_of(program)
    before = graph_state(graph_module)["state_dict"]
    FuseBiasInLinear()(graph_module)
    FuseBiasInLinear()(graph_module, reverse=True)
    assert graph_state(graph_module)["state_dict"] == before


def test_a_subclass_is_skipped() -> None:
    check_refused(FuseBiasInLinear(), by_fx(_call, layer=Inherited(4, 4)), X, "layer: Inherited is a subclass")


def test_a_linear_with_hooks_is_skipped() -> None:
    program = randomise(Program(_call, layer=nn.Linear(4, 4)))
    program.layer.register_forward_hook(lambda module, args, result: result * 2)
    check_refused(FuseBiasInLinear(), graph_of(program), X, "layer: the module has hooks")


def test_linear_with_a_replaced_forward_is_skipped() -> None:
    program = randomise(Program(_call, layer=nn.Linear(4, 4)))
    weight = program.layer.weight
    program.layer.forward = lambda x: F.linear(x, weight * 2)
    check_refused(FuseBiasInLinear(), graph_of(program), X, "layer: ")


def test_a_parametrized_linear_is_skipped() -> None:
    graph_module = by_fx(_call, layer=parametrizations.weight_norm(nn.Linear(4, 4)))
    check_refused(FuseBiasInLinear(), graph_module, X, "layer: ParametrizedLinear is a subclass of Linear")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_linear_with_a_tied_parameter_is_skipped(name: str) -> None:
    layers = {"layer": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    setattr(layers["other"], name, getattr(layers["layer"], name))
    graph_module = by_fx(lambda m, x: m.layer(x) - m.other(x), **layers)
    reasons = (f"layer: the {name} is tied to other", f"other: the {name} is tied to layer")
    check_refused(FuseBiasInLinear(), graph_module, X, *reasons)


def test_a_linear_under_two_names_is_skipped() -> None:
    program = randomise(Program(lambda m, x: m.layer(m.layer(x)), layer=nn.Linear(4, 4)))
    graph = graph_of(program).graph
    graph.find_nodes(op="call_module")[1].target = "alias"
    program.alias = program.layer
    reason = "the same module has the names alias and layer"
    check_refused(FuseBiasInLinear(), GraphModule(program, graph), X, f"layer: {reason}", f"alias: {reason}")


def test_linear_with_a_bias_read_elsewhere_is_skipped() -> None:
    graph_module = by_fx(lambda m, x: m.layer(x) - m.layer.bias, layer=nn.Linear(4, 4))
    check_refused(FuseBiasInLinear(), graph_module, X, "layer: the graph also reads the bias directly")


def test_a_bias_of_another_dtype_is_skipped() -> None:
    program = randomise(Program(_call, layer=nn.Linear(4, 4)))
    program.layer.bias.data = program.layer.bias.data.double()
    check_refused(FuseBiasInLinear(), graph_of(program), None, "layer: weight and bias differ in dtype")


def test_only_trainable_bias_is_skipped() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    check_refused(FuseBiasInLinear(), by_fx(_call, layer=layer), X, "layer: weight and bias differ in")


def test_call_without_a_single_tensor_is_skipped() -> None:
    graph_module = by_fx(_call, layer=nn.Linear(4, 4))
    (call,) = calls(graph_module, nn.Linear)
    call.args = ((call.args[0],),)
    graph_module.recompile()
    check_refused(FuseBiasInLinear(), graph_module, None, "layer: the module is not called with a single tensor")


def test_undo_after_folding_a_norm_is_right_or_fails() -> None:
    graph_module = by_export(X[0], lambda m, x: m.norm(m.layer(x)), layer=nn.Linear(4, 3), norm=nn.BatchNorm1d(3))
    check_undo_alone([FuseBiasInLinear(), FuseBatchNorm1dInLinear()], graph_module, X[0])


def test_undo_after_a_second_application_is_right_or_fails() -> None:
    rule, fold = FuseBiasInLinear(), FuseBatchNorm1dInLinear()
    graph_module = by_export(X[0], lambda m, x: m.norm(m.layer(x)), layer=nn.Linear(4, 3), norm=nn.BatchNorm1d(3))
    want = outputs(graph_module, X[0])
    for step in (rule, fold, rule):
        step(graph_module)
    try:
        rule(graph_module, reverse=True)
    except TransformationError:
        return
    torch.testing.assert_close(outputs(graph_module, X[0]), want)
    assert not [node for node in graph_module.graph.nodes if node.name.startswith("pad")]


def test_padded_linears_are_not_merged_with_others() -> None:
    graph_module = by_fx(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(4, 3), k=nn.Linear(4, 3))
    check_undo_alone([FuseBiasInLinear(), MergeLinears()], graph_module, X)


def test_a_bias_cut_out_of_another_tensor_is_skipped() -> None:
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(torch.randn(4, 3)[:, 1])
    graph_module = graph_of(Program(lambda m, x: m.layer(x), layer=layer).eval())
    check_refused(FuseBiasInLinear(), graph_module, None, "layer: the weight or bias is not contiguous")


def test_metadata_of_the_padded_input_has_its_shape() -> None:
    x = torch.randn(2, 4)
    graph_module = FuseBiasInLinear()(by_export(x, lambda m, x: m.layer(x), layer=nn.Linear(4, 3)))
    (padded,) = graph_module.graph.find_nodes(op="call_function", target=F.pad)
    assert padded.meta["val"].shape[1:] == (5,)
