"""Undo restores linears with their attributes and hooks, not only weight and bias."""

from __future__ import annotations

import copy
import gc
import io
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx import GraphModule

from optexport.testing import check_applied, check_refused, copy_sharing_modules, graph_state
from optexport.transformations import FuseBiasInLinear, MergeLinears, ReversibleRule, compose
from optexport.transformations.base import marks
from tests._helpers.graphs import Program, graph_of

X = torch.linspace(-2, 2, 12).reshape(3, 4)
RULES: tuple[ReversibleRule, ...] = (MergeLinears(), FuseBiasInLinear())
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def _two(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.q(x) - 2 * m.k(x)


def _graph(change: Callable[[Any], Any] = lambda linear: None) -> GraphModule:
    torch.manual_seed(0)
    program = Program(_two, q=nn.Linear(4, 3), k=nn.Linear(4, 3)).eval()
    change(program.q)
    return graph_of(program)


def _bias_first(linear: Any) -> None:
    linear._parameters = {name: linear._parameters[name] for name in ("bias", "weight")}


def _without_weight_norm(linear: Any) -> None:
    nn.utils.parametrizations.weight_norm(linear)
    nn.utils.parametrize.remove_parametrizations(linear, "weight")


def _tagged(linear: Any) -> None:
    linear.tag, linear.rank = ["mine"], 3


CHANGES = [_tagged, _bias_first, _without_weight_norm]


@pytest.mark.sample(2)
@each_rule
@pytest.mark.parametrize("change", CHANGES)
def test_undo_restores_attributes_hooks_and_parameter_order(rule: ReversibleRule, change: Callable[[Any], Any]) -> None:
    check_applied(rule, _graph(change), X, count=1 if rule == MergeLinears() else 2)


@each_rule
def test_undo_restores_equal_attributes_and_copies_in_a_copy(rule: ReversibleRule) -> None:
    graph_module = _graph(_tagged)
    tag = graph_module.q.tag
    changed = rule(graph_module)
    copied = rule(copy.deepcopy(changed), reverse=True)
    assert copied.q.tag == ["mine"]
    assert copied.q.tag is not tag
    assert rule(changed, reverse=True).q.tag is tag


@each_rule
def test_a_hook_added_after_undo_is_not_in_the_model(rule: ReversibleRule) -> None:
    original = _graph()
    undone = rule(rule(copy_sharing_modules(original)), reverse=True)
    undone.q.register_forward_hook(lambda module, args, result: result * 2)
    undone.q.register_buffer("more", torch.ones(1))
    assert not original.q._forward_hooks
    assert not original.q._buffers


@each_rule
def test_undo_keeps_the_mode_that_was_set_in_between(rule: ReversibleRule) -> None:
    changed = rule(_graph())
    changed.train()
    undone = rule(changed, reverse=True)
    assert undone.q.training
    assert undone.k.training


@pytest.mark.parametrize("order", [RULES, RULES[::-1]])
def test_undo_of_both_rules_restores_everything(order: tuple[ReversibleRule, ...]) -> None:
    graph_module = _graph(_tagged)
    before = graph_state(graph_module)
    both = compose(*order)
    assert graph_state(both(both(graph_module), reverse=True)) == before
    assert graph_module.q.tag == ["mine"]


def test_undo_restores_linears_with_two_inputs() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        negative = x.neg()
        return m.q(x) - m.k(x) + m.q(negative) * m.k(negative)

    program = Program(body, q=nn.Linear(4, 3), k=nn.Linear(4, 3)).eval()
    _tagged(program.q)
    graph_module = graph_of(program)
    check_applied(MergeLinears(), graph_module, X)


def test_a_merge_keeps_no_second_copy_of_the_weights() -> None:
    gc.freeze()  # so that a collection visits only what is new
    graph_module = _graph(_tagged)
    before = [weakref.ref(parameter) for parameter in graph_module.parameters()]
    MergeLinears()(graph_module)
    merged = [weakref.ref(parameter) for parameter in graph_module.parameters()]
    gc.collect()
    assert [ref() for ref in before] == [None] * 4
    MergeLinears()(graph_module, reverse=True)
    gc.collect()
    gc.unfreeze()
    assert [ref() for ref in merged] == [None] * 2


@each_rule
def test_node_records_are_plain_data(rule: ReversibleRule) -> None:
    for node in rule(_graph(_tagged)).graph.nodes:
        json.dumps(list(marks(node).values()))


@pytest.mark.sample(1)
@each_rule
def test_replaced_modules_do_not_disturb_export_and_save(rule: ReversibleRule) -> None:
    graph_module = _graph(_tagged)
    with torch.no_grad():
        want = graph_module(X)
        changed = rule(graph_module)
        torch.testing.assert_close(torch.jit.trace(changed, (X,))(X), want)
        program = torch.export.export(changed, (X,))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        torch.testing.assert_close(torch.export.load(file).module()(X), want)
        again = io.BytesIO()
        torch.save(changed, again)
        again.seek(0)
        torch.testing.assert_close(torch.load(again, weights_only=False)(X), want)


@each_rule
def test_undo_after_a_transformer_restores_attributes(rule: ReversibleRule) -> None:
    changed = fx.Transformer(rule(_graph(_tagged))).transform()
    assert rule(changed, reverse=True).q.tag == ["mine"]


@each_rule
def test_weight_with_strides_that_undo_would_lose_is_skipped(rule: ReversibleRule) -> None:
    program = Program(_two, q=nn.Linear(1, 3), k=nn.Linear(1, 3)).eval()
    for linear in (program.q, program.k):
        linear.weight = nn.Parameter(torch.randn(3).as_strided((3, 1), (1, 5)))
        assert linear.weight.is_contiguous()
    reasons = ["q: the weight or bias is not contiguous"]
    if rule == MergeLinears():
        reasons = [f"{reasons[0]}; k: the weight or bias is not contiguous"]
    else:
        reasons.append("k: the weight or bias is not contiguous")
    check_refused(rule, graph_of(program), X[:, :1], *reasons)
