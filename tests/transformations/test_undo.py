"""Undo after other operations on a graph works, or raises an error with the reason."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx import GraphModule, Node

from optexport.api import symbolic_trace
from optexport.errors import TransformationError
from optexport.testing import assert_close, assert_same, check_undo_alone, copy_sharing_modules, graph_state, outputs
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    Match,
    MergeLinears,
    ReversibleRule,
    Rule,
    Skip,
    compose,
)
from optexport.transformations.rule import run
from tests._helpers.graphs import by_export, by_fx, calls

X = torch.linspace(-2, 2, 12).reshape(3, 4)
REVERSIBLE: tuple[ReversibleRule, ...] = (MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse())
each_reversible = pytest.mark.parametrize("rule", REVERSIBLE, ids=lambda rule: type(rule).__name__)


def _graph(dead: bool = False) -> GraphModule:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.q(x), m.k(x / 3), m.v(x)
        rest = v - x[:, :2] / 5
        return q + k if dead else q + k + rest

    return by_fx(body, q=nn.Linear(4, 2), k=nn.Linear(4, 2), v=nn.Linear(4, 2))


def _refuses_to_undo(rule: ReversibleRule, graph_module: GraphModule, message: str) -> None:
    before = graph_state(graph_module)
    with pytest.raises(TransformationError, match=f"{type(rule).__name__}: {message}"):
        rule(graph_module, reverse=True)
    assert graph_state(graph_module) == before


@each_reversible
def test_undo_without_application_is_refused(rule: ReversibleRule) -> None:
    _refuses_to_undo(rule, _graph(), "the rule was not applied to this graph")


@each_reversible
def test_undo_without_matches_changes_nothing(rule: ReversibleRule) -> None:
    graph_module = by_fx(lambda m, x: x + 1)
    before = graph_state(graph_module)
    rule(rule(graph_module), reverse=True)
    assert graph_state(graph_module) == before


@each_reversible
def test_undo_of_a_mark_set_by_hand_is_refused(rule: ReversibleRule) -> None:
    graph_module = _graph()
    for node in graph_module.graph.nodes:
        rule.mark_as_transformed(node)
    _refuses_to_undo(rule, graph_module, "the rule was not applied to this graph")


@each_reversible
def test_a_second_undo_changes_nothing(rule: ReversibleRule) -> None:
    graph_module = _graph()
    before = graph_state(graph_module)
    rule(rule(rule(graph_module), reverse=True), reverse=True)
    assert graph_state(graph_module) == before


@each_reversible
def test_apply_and_undo_may_alternate(rule: ReversibleRule) -> None:
    graph_module = _graph()
    before = graph_state(graph_module)
    for _ in range(3):
        _, report = run(rule, graph_module)
        assert report.changes
        rule(graph_module, reverse=True)
    assert graph_state(graph_module) == before


def _pickled(graph_module: GraphModule) -> GraphModule:
    return pickle.loads(pickle.dumps(graph_module))


def _saved(graph_module: GraphModule) -> GraphModule:
    file = io.BytesIO()
    torch.save(graph_module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_reversible
@pytest.mark.parametrize("through", [_pickled, _saved, lambda graph_module: _pickled(copy.deepcopy(graph_module))])
def test_undo_after_pickling_reports_lost_marks(
    rule: ReversibleRule, through: Callable[[GraphModule], GraphModule]
) -> None:
    _refuses_to_undo(rule, through(rule(_graph())), r"the number of marked nodes changed \(expected \d+, found 0\)")


@pytest.mark.sample(3)
@each_reversible
@pytest.mark.parametrize(
    "through",
    [
        lambda graph_module: copy.deepcopy(_pickled(graph_module)),
        lambda graph_module: symbolic_trace(_pickled(graph_module)),
        lambda graph_module: GraphModule(_saved(graph_module), graph_module.graph),
        fx.symbolic_trace,
    ],
)
def test_undo_without_marks_and_journal_fails(
    rule: ReversibleRule, through: Callable[[GraphModule], GraphModule]
) -> None:
    pickled = _pickled(rule(_graph()))
    _refuses_to_undo(
        rule, through(pickled), r"(the rule was not applied to this graph|the number of marked nodes changed)"
    )


def test_undo_of_a_composition_after_pickling_fails() -> None:
    both = compose(*REVERSIBLE, inplace=False)
    with pytest.raises(TransformationError):
        both(_pickled(both(_graph())), reverse=True)


@each_reversible
def test_undo_after_a_transformer_is_exact(rule: ReversibleRule) -> None:
    original = _graph()
    want = outputs(original, X)
    changed = fx.Transformer(rule(copy_sharing_modules(original))).transform()
    assert rule.get_transformed_nodes(changed)
    restored = rule(changed, reverse=True)
    assert_same(outputs(restored, X), want, "undone")
    assert {name for name, _ in restored.named_parameters()} == {name for name, _ in original.named_parameters()}


@each_reversible
def test_undo_after_deepcopy_of_a_deepcopy_is_exact(rule: ReversibleRule) -> None:
    graph_module = _graph()
    before = graph_state(graph_module)
    changed = copy.deepcopy(copy.deepcopy(rule(graph_module)))
    assert graph_state(rule(changed, reverse=True)) == before


@each_reversible
def test_undo_after_dead_code_elimination_without_effect(rule: ReversibleRule) -> None:
    graph_module = _graph()
    before = graph_state(graph_module)
    assert not rule(graph_module).graph.eliminate_dead_code()
    assert graph_state(rule(graph_module, reverse=True)) == before


@each_reversible
def test_undo_after_dead_code_elimination_fails_and_restores(rule: ReversibleRule) -> None:
    graph_module = rule(_graph(dead=True))
    assert graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    before = graph_state(graph_module)
    with pytest.raises(TransformationError):
        rule(graph_module, reverse=True)
    assert graph_state(graph_module) == before


def test_undo_that_fails_midway_leaves_the_graph_unchanged() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.c(x)
        y = m.a(x) + m.b(x)
        return m.d(y) + m.e(y)

    graph_module = by_fx(body, **{name: nn.Linear(4, 4) for name in "abcde"})
    rule = MergeLinears()
    rule(graph_module)
    unused = next(node for node in graph_module.graph.nodes if node.name == "c")
    graph_module.graph.erase_node(unused)
    graph_module.recompile()
    before = graph_state(graph_module)
    with pytest.raises(TransformationError, match=r"MergeLinears: .* has lost slices \(expected 3, found 2\)"):
        rule(graph_module, reverse=True)
    assert graph_state(graph_module) == before


def test_undo_of_a_merge_with_a_reader_of_the_whole_fails() -> None:
    graph_module = _graph()
    MergeLinears()(graph_module)
    (merged,) = [n for n in calls(graph_module, nn.Linear) if "merged" in n.target]
    with graph_module.graph.inserting_after(merged):
        graph_module.graph.call_function(torch.neg, (merged,))
    graph_module.recompile()
    before = graph_state(graph_module)
    with pytest.raises(TransformationError, match=r"neg uses .* as a whole"):
        MergeLinears()(graph_module, reverse=True)
    assert graph_state(graph_module) == before


def test_undo_with_another_option_of_a_rule_is_refused() -> None:
    graph_module = ChangeTrueDivToMulByInverse()(_graph())
    _refuses_to_undo(ChangeTrueDivToMulByInverse(exact=True), graph_module, "the rule was not applied to this graph")


def test_rules_with_different_matches_are_undone_in_any_order() -> None:
    for order in itertools.permutations(REVERSIBLE[::2]):
        graph_module = _graph()
        before = graph_state(graph_module)
        compose(*REVERSIBLE[::2])(graph_module)
        for rule in order:
            rule(graph_module, reverse=True)
        assert graph_state(graph_module) == before


@pytest.mark.slow
def test_undo_of_any_single_rule_is_right_or_fails() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.norm(m.first(x / 3))
        return m.last(m.q(x) - m.k(x)) / 5

    graph_module = by_export(
        X,
        body,
        first=nn.Linear(4, 5),
        norm=nn.BatchNorm1d(5),
        q=nn.Linear(5, 3),
        k=nn.Linear(5, 3, bias=False),
        last=nn.BatchNorm1d(3),
    )
    rules: tuple[Rule, ...] = (*REVERSIBLE, FuseBatchNorm1dInLinear(), FuseBatchNorm2dInConv2d())
    orders = [*itertools.permutations(rules, 2), *itertools.permutations(rules, 3)]
    orders += random.Random(0).sample([*itertools.permutations(rules)], 12)
    for order in orders:
        check_undo_alone(order, graph_module, X)


@dataclass(frozen=True)
class _FailsAtTheSecond(ReversibleRule):
    """Doubles dividends; its undo fails at the second match."""

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        return Match((node,)) if node.op == "call_module" and not self.transformed(node) else None

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        if match.nodes[0].name == "k":
            raise RuntimeError("on purpose")
        return [(match.nodes[0], None)]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None: ...


def test_rule_that_fails_midway_leaves_nothing_to_undo() -> None:
    graph_module = _graph()
    with pytest.raises(RuntimeError, match="on purpose"):
        _FailsAtTheSecond()(graph_module)
    _refuses_to_undo(_FailsAtTheSecond(), graph_module, "the rule was not applied to this graph")
    assert not _FailsAtTheSecond().get_transformed_nodes(graph_module)


def test_undone_graph_matches_an_export_of_the_model() -> None:
    graph_module = by_export(X, lambda m, x: m.q(x) * m.k(x), q=nn.Linear(4, 3), k=nn.Linear(4, 3))
    want = outputs(graph_module, X)
    rules = compose(MergeLinears(), FuseBiasInLinear())
    exported = torch.export.export(rules(rules(graph_module), reverse=True), (X,)).module()
    assert_close(outputs(exported, X), want, "exported")
