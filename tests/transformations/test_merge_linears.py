"""MergeLinears: matches, and exact undo."""

from __future__ import annotations

import copy
import gc
import operator
import time
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from optexport.api import symbolic_trace
from optexport.testing import check_applied, check_laws, check_undo_alone, copy_sharing_modules, outputs
from optexport.transformations import FuseBiasInLinear, MergeLinears
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Program, by_export, by_fx, calls, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


def _three(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([m.q(x), m.k(x), m.v(x)], dim=-1)


def _sum_of_block(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.block[0](x) + m.block[1](x)


def test_golden_graph_before_and_after() -> None:
    graph_module = by_fx(_three, q=nn.Linear(4, 2), between=nn.ReLU(), k=nn.Linear(4, 3, bias=False), v=nn.Linear(4, 1))
    before = """
graph():
    %x : [num_users=3] = placeholder[target=x]
    %q : [num_users=1] = call_module[target=q](args = (%x,), kwargs = {})
    %k : [num_users=1] = call_module[target=k](args = (%x,), kwargs = {})
    %v : [num_users=1] = call_module[target=v](args = (%x,), kwargs = {})
    %cat : [num_users=1] = call_function[target=torch.cat](args = ([%q, %k, %v],), kwargs = {dim: -1})
    return cat"""
    after = """
graph():
    %x : [num_users=1] = placeholder[target=x]
    %q_k_v_merged : [num_users=3] = call_module[target=q-k-v-merged](args = (%x,), kwargs = {})
    %q : [num_users=1] = call_function[target=operator.getitem](args = (%q_k_v_merged, (Ellipsis, slice(0, 2, None))), kwargs = {})
    %k : [num_users=1] = call_function[target=operator.getitem](args = (%q_k_v_merged, (Ellipsis, slice(2, 5, None))), kwargs = {})
    %v : [num_users=1] = call_function[target=operator.getitem](args = (%q_k_v_merged, (Ellipsis, slice(5, 6, None))), kwargs = {})
    %cat : [num_users=1] = call_function[target=torch.cat](args = ([%q, %k, %v],), kwargs = {dim: -1})
    return cat"""  # noqa: E501
    assert str(graph_module.graph) == before.lstrip()
    transformed = check_laws(MergeLinears(), graph_module, X)
    assert str(transformed.graph) == after.lstrip()
    assert str(MergeLinears()(transformed, reverse=True).graph) == before.lstrip()


def test_queries_keys_and_values_are_merged_in_every_layer() -> None:
    report = check_applied(MergeLinears(), models.traced("bert"), models.inputs("bert"), count=2)
    prefix = "encoder.layer.{}.attention.self.query-key-value-merged"
    assert [change.target for change in report.changes] == [prefix.format(0), prefix.format(1)]
    assert not report.near_misses


def test_gate_and_up_projections_are_merged() -> None:
    graph_module = models.traced("llama")
    after, report = run(MergeLinears(), copy_sharing_modules(graph_module))
    assert Counter(len(change.replaced) for change in report.changes) == {3: 2, 2: 2}
    names = [change.target for change in report.changes]
    assert "model.layers.1.mlp.gate_proj-up_proj-merged" in names
    assert after.get_submodule("model.layers.1.mlp.gate_proj-up_proj-merged").out_features == 48


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_cross_attention_of_all_decoder_layers_is_one_merge(name: str) -> None:
    _, report = run(MergeLinears(), copy_sharing_modules(models.traced(name)))
    # The keys and values of the encoder state, in both decoder layers.
    assert sorted(len(change.replaced) for change in report.changes)[-1] == 4


@pytest.mark.slow
def test_linears_that_are_always_called_together_are_merged() -> None:
    graph_module = models.traced("albert")
    report = check_applied(MergeLinears(), graph_module, models.inputs("albert"))
    (change,) = report.changes
    assert len(change.nodes) == 3
    assert len(change.replaced) == 9
    after, _ = run(MergeLinears(), copy_sharing_modules(graph_module))
    assert len({node.target for node in calls(after, nn.Linear) if "merged" in node.target}) == 1


def test_undo_restores_alternating_calls() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = m.q(x) - 2 * m.k(x)
        return m.k(first) - 3 * m.q(first)

    check_applied(MergeLinears(), by_fx(body, q=nn.Linear(4, 4), k=nn.Linear(4, 4)), X)


@pytest.mark.parametrize("biased", [(True, True), (True, False), (False, True), (False, False)])
def test_undo_adds_no_new_bias(biased: tuple[bool, bool]) -> None:
    q, k = (nn.Linear(4, 2, bias=bias) for bias in biased)
    check_applied(MergeLinears(), by_fx(lambda m, x: m.q(x) * m.k(x), q=q, k=k), X)


def test_keyword_calls_are_merged_and_come_back_as_keyword_calls() -> None:
    graph_module = by_fx(lambda m, x: m.q(input=x) * m.k(x), q=nn.Linear(4, 2), k=nn.Linear(4, 2))
    check_applied(MergeLinears(), graph_module, X)
    assert "self.q(input = x)" in graph_module.code


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_linears_are_merged_wherever_they_are_nested(depth: int) -> None:
    inner: nn.Module = Program(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(4, 2), k=nn.Linear(4, 2))
    for _ in range(depth):
        inner = nn.Sequential(nn.Identity(), inner)
    graph_module = graph_of(randomise(inner))
    check_applied(MergeLinears(), graph_module, X)


def test_linears_of_different_parents_are_merged_under_the_first() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b[1](x) * m.a[1](x)

    graph_module = by_fx(
        body,
        a=nn.Sequential(nn.Identity(), nn.Linear(4, 2)),
        b=nn.Sequential(nn.Identity(), nn.Linear(4, 2), nn.Identity()),
    )
    check_applied(MergeLinears(), graph_module, X)


@pytest.mark.parametrize("widths", [(0, 3), (3, 0), (0, 0), (1, 1), (1, 5, 1)])
def test_zero_and_one_output_feature(widths: tuple[int, ...]) -> None:
    def body(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(m, f"l{i}")(x) for i in range(len(widths))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when layers without features are created
        layers = {f"l{i}": nn.Linear(4, width) for i, width in enumerate(widths)}
    check_applied(MergeLinears(), by_fx(body, **layers), X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_floating_dtype(dtype: torch.dtype) -> None:
    graph_module = by_fx(_three, q=nn.Linear(4, 2), k=nn.Linear(4, 3, bias=False), v=nn.Linear(4, 1)).to(dtype)
    check_applied(MergeLinears(), graph_module, X.to(dtype))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4)])
def test_inputs_of_every_rank(shape: tuple[int, ...]) -> None:
    graph_module = by_fx(_three, q=nn.Linear(4, 2), k=nn.Linear(4, 3), v=nn.Linear(4, 1))
    check_applied(MergeLinears(), graph_module, torch.randn(shape))


def test_heads_are_viewed_from_a_slice_like_from_the_whole() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.q(x).view(2, 3, 2, 3).transpose(1, 2)
        k = m.k(x).view((2, -1, 2, 3)).transpose(1, 2)
        return torch.matmul(q, k.transpose(2, 3))

    linears = {"q": nn.Linear(4, 6), "k": nn.Linear(4, 6)}
    check_applied(MergeLinears(), by_fx(body, **linears), X)
    check_applied(MergeLinears(), by_export(X, body, **linears), X)


def test_two_groups_on_one_input_are_merged_separately() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.a(x) + m.b(x) + m.c(x) + m.d(x)

    layers = {name: nn.Linear(4, 2) for name in "abcd"}
    layers["a"].requires_grad_(False)
    layers["c"].requires_grad_(False)
    report = check_applied(MergeLinears(), by_fx(body, **layers), X, count=2)
    assert [change.replaced for change in report.changes] == [("a", "c"), ("b", "d")]


def test_two_groups_with_different_calls_are_merged_separately() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = m.a(x) - m.b(x)
        return m.c(x) * m.d(x) * m.a(first) * m.b(first)

    report = check_applied(MergeLinears(), by_fx(body, **{name: nn.Linear(4, 4) for name in "abcd"}), X, count=2)
    assert [change.target for change in report.changes] == ["a-b-merged", "c-d-merged"]


def test_frozen_linears_stay_frozen() -> None:
    layers = {name: nn.Linear(4, 2).requires_grad_(False) for name in "qk"}
    check_applied(MergeLinears(), by_fx(lambda m, x: m.q(x) * m.k(x), **layers), X)


def test_an_input_may_change_before_or_after_all_calls() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = (x + 1).mul_(2)
        y = m.q(x) - m.k(x)
        return y + x.add_(1).sum()

    check_applied(MergeLinears(), by_fx(body, q=nn.Linear(4, 2), k=nn.Linear(4, 2)), X)


def test_in_place_change_of_a_result_changes_no_other() -> None:
    def body(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = m.q(x)
        q.relu_()
        return m.k(x) - 1, q

    check_applied(MergeLinears(), by_fx(body, q=nn.Linear(4, 2), k=nn.Linear(4, 2)), X)


def test_unused_results_are_restored_too() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.q(x)
        return m.k(x)

    check_applied(MergeLinears(), by_fx(body, q=nn.Linear(4, 2), k=nn.Linear(4, 3)), X)


def test_existing_name_is_not_used_again() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return getattr(m, "q-k-merged")(m.q(x) * m.k(x))

    layers = {"q": nn.Linear(4, 2), "k": nn.Linear(4, 2), "q-k-merged": nn.Linear(2, 1)}
    check_applied(MergeLinears(), by_fx(body, **layers), X)


def test_nodes_are_found_by_their_new_target() -> None:
    graph_module = by_fx(_three, q=nn.Linear(4, 2), k=nn.Linear(4, 3), v=nn.Linear(4, 1))
    MergeLinears()(graph_module)
    assert len(graph_module.graph.find_nodes(op="call_function", target=operator.getitem)) == 3
    assert len(graph_module.graph.find_nodes(op="call_module")) == 1
    MergeLinears()(graph_module, reverse=True)
    assert len(graph_module.graph.find_nodes(op="call_module")) == 3
    assert not graph_module.graph.find_nodes(op="call_function", target=operator.getitem)


def test_traced_model_keeps_its_linears() -> None:
    model = randomise(Program(_three, q=nn.Linear(4, 2), k=nn.Linear(4, 3), v=nn.Linear(4, 1)))
    want = outputs(model, X)
    MergeLinears()(graph_of(model))
    assert [name for name, _ in model.named_children()] == ["q", "k", "v"]
    assert torch.equal(outputs(model, X)[0], want[0])


def test_callers_container_is_not_changed() -> None:
    program = randomise(Program(_sum_of_block, block=nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2))))
    graph_module = graph_of(program)
    graph_module.block = program.block
    check_applied(MergeLinears(), graph_module, X)
    assert len(program.block) == 2


def test_linears_in_different_modes_keep_their_modes() -> None:
    graph_module = by_fx(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(4, 2), k=nn.Linear(4, 2))
    graph_module.q.train()
    check_laws(MergeLinears(), graph_module, X)


def test_shapes_in_the_metadata_match_the_merged_linear() -> None:
    graph_module = by_export(X, _three, q=nn.Linear(4, 2), k=nn.Linear(4, 3), v=nn.Linear(4, 1))
    transformed = MergeLinears()(graph_module)
    (merged,) = calls(transformed, nn.Linear)
    assert merged.meta["val"].shape[-1] == 6


def _pairs(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(count))


def _seconds(graph_module: GraphModule, reverse: bool) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        MergeLinears()(graph_module, reverse=reverse)
        return time.process_time() - start
    finally:
        gc.enable()


@pytest.mark.nightly
def test_time_is_linear_in_the_linears_of_one_input() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in m.layers])

    few, many = (by_fx(body, layers=nn.ModuleList(nn.Linear(4, 1) for _ in range(count))) for count in (400, 4000))
    before, want = str(many.graph), outputs(many, X)
    # For ten times as many, linear time grows 10 times and quadratic time 100 times.
    assert _seconds(many, reverse=False) / _seconds(few, reverse=False) < 40
    assert len(calls(many, nn.Linear)) == 1
    torch.testing.assert_close(outputs(many, X), want)
    assert _seconds(many, reverse=True) / _seconds(few, reverse=True) < 40
    assert str(many.graph) == before


@pytest.mark.nightly
@pytest.mark.parametrize("reverse", [False, True], ids=["apply", "undo"])
def test_time_is_linear_in_the_number_of_groups(reverse: bool) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        for block in m.blocks:
            x = block[0](x) + block[1](x)
        return x

    def seconds(original: GraphModule) -> float:
        graph_module = copy.deepcopy(original)
        if reverse:
            MergeLinears()(graph_module)
        return _seconds(graph_module, reverse)

    few, many = (by_fx(body, blocks=_pairs(count)) for count in (75, 375))
    # For five times as many, linear time grows 5 times and quadratic time 25 times.
    assert min(seconds(many) for _ in range(2)) / min(seconds(few) for _ in range(4)) < 10


@pytest.mark.parametrize("bias", [True, False])
def test_undo_before_a_later_rule_is_right_or_refused(bias: bool) -> None:
    graph_module = by_fx(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(4, 2, bias=bias), k=nn.Linear(4, 2))
    check_undo_alone([MergeLinears(), FuseBiasInLinear()], graph_module, X)


@pytest.mark.slow
def test_linears_with_integer_weights() -> None:
    layers = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 3, bias=False)}
    program = Program(lambda m, x: m.q(x) - 2 * m.k(x), **layers).eval()
    for layer in layers.values():
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter((parameter * 9).long(), requires_grad=False))
    x = torch.arange(12).reshape(3, 4)
    for graph_module in (graph_of(program), symbolic_trace(program, example_inputs={"x": x})):
        check_applied(MergeLinears(), graph_module, x)
        check_applied(FuseBiasInLinear(), graph_module, x)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("widths", [(0, 4), (4, 0), (0, 0), (0, 4, 0)])
def test_undo_restores_calls_of_linears_without_features(
    widths: tuple[int, ...],
) -> None:
    names = [f"l{i}" for i in range(len(widths))]

    def body(m: Any, x: torch.Tensor) -> Any:
        y = x + 1
        return [getattr(m, n)(x) for n in names], [getattr(m, n)(y) for n in reversed(names)]

    layers = {name: nn.Linear(8, width) for name, width in zip(names, widths, strict=True)}
    x = torch.linspace(-2, 2, 24).reshape(3, 8)
    check_applied(MergeLinears(), by_fx(body, **layers), x)
    check_applied(MergeLinears(), by_export(x, body, **layers), x)
