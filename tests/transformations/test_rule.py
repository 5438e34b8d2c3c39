"""The driver of rules: marks, counts and reports."""

from __future__ import annotations

import copy
import operator
import threading
import warnings
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.errors import TransformationError
from optexport.testing import (
    check_applied,
    check_laws,
    check_refused,
    copy_sharing_modules,
    graph_state,
    outputs,
)
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm2dInConv2d,
    Match,
    MergeLinears,
    ReversibleRule,
    Skip,
    Transformation,
    compose,
)
from optexport.transformations.rule import run
from tests._helpers.graphs import Inherited, by_fx

X = torch.linspace(-2, 2, 12).reshape(3, 4)


@dataclass(frozen=True)
class SwapSummands(ReversibleRule):
    """a + b  ->  b + a, the smallest reversible rule.

    Skips:   a number added.
    """

    backwards: bool = False

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.target is not operator.add or self.transformed(node):
            return None
        if not all(isinstance(summand, Node) for summand in node.args):
            return Skip("a number is added")
        return Match((node,))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        node.args = node.args[::-1]
        return [(node, {"swapped": True})]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        assert record == {"swapped": True}
        node.args = node.args[::-1]


def _sums() -> GraphModule:
    return by_fx(lambda m, x: (x + x.exp()) + (m.q(x) + 1), q=nn.Linear(4, 4))


def test_unknown_keyword_of_the_helper_is_named() -> None:
    with pytest.raises(TypeError, match="places"):
        check_applied(SwapSummands(), _sums(), X, places=2)  # type: ignore[call-arg]


def test_custom_rule_keeps_the_laws() -> None:
    report = check_applied(SwapSummands(), _sums(), X, count=2, exact=True)
    assert [near_miss.reason for near_miss in report.near_misses] == ["a number is added"]
    check_laws(compose(SwapSummands(), MergeLinears(), SwapSummands(backwards=True)), _sums(), X)


def test_options_are_part_of_the_signature_and_cannot_be_changed() -> None:
    rule = SwapSummands()
    assert rule.signature == SwapSummands(backwards=False).signature != SwapSummands(backwards=True).signature
    with pytest.raises(FrozenInstanceError):
        rule.backwards = True  # type: ignore[misc]


def test_changes_and_near_misses_are_reported_by_node() -> None:
    graph_module = by_fx(
        lambda m, x: (m.q(x) + m.k(x)) / 3 + m.odd(x) / 0, q=nn.Linear(4, 2), k=nn.Linear(4, 2), odd=Inherited(4, 2)
    )
    graph_module, merged = run(MergeLinears(), graph_module)
    assert [(c.nodes, c.target, c.replaced) for c in merged.changes] == [(("q_k_merged",), "q-k-merged", ("q", "k"))]
    assert [(n.node, n.reason) for n in merged.near_misses] == [("x", "odd: Inherited is a subclass of Linear")]
    graph_module, divided = run(ChangeTrueDivToMulByInverse(), graph_module)
    assert [(c.nodes, c.replaced) for c in divided.changes] == [(("truediv",), ("truediv",))]
    assert [(n.node, n.reason) for n in divided.near_misses] == [("truediv_1", "the divisor is 0")]


def test_report_names_the_marked_nodes() -> None:
    graph_module, report = run(
        MergeLinears(), by_fx(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(4, 2), k=nn.Linear(4, 2))
    )
    marked = MergeLinears().get_transformed_nodes(graph_module)
    assert tuple(node.name for node in marked) == report.changes[0].nodes


def test_a_second_run_reports_nothing_new() -> None:
    graph_module, first = run(SwapSummands(), _sums())
    _, second = run(SwapSummands(), graph_module)
    assert first.changes
    assert not second.changes


def test_rule_without_matches_reports_nothing() -> None:
    check_refused(FuseBatchNorm2dInConv2d(), _sums(), X)


def test_other_transformations_report_the_nodes_that_differ() -> None:
    class ExpToLog(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            for node in graph_module.graph.find_nodes(op="call_method", target="exp"):
                node.target = "log"
            return graph_module

    class Marks(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            self.mark_as_transformed(graph_module.graph.find_nodes(op="call_method", target="log")[0])
            return graph_module

    graph_module, report = run(ExpToLog(), _sums())
    assert [change.nodes for change in report.changes] == [("exp",)]
    assert "log" in graph_module.code
    graph_module, report = run(Marks(), graph_module)
    assert [change.nodes for change in report.changes] == [("exp",)]
    _, report = run(ExpToLog(), graph_module)
    assert not report.changes


def test_graph_is_linted_and_recompiled_after_a_run() -> None:
    graph_module, _ = run(MergeLinears(), by_fx(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(4, 2), k=nn.Linear(4, 2)))
    assert "q_k_merged" in graph_module.code
    assert outputs(graph_module, X)[0].shape == (3, 2)


def test_a_rule_may_erase_the_node_that_it_matched_at() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.BatchNorm2d(1), nn.BatchNorm2d(1))
    graph_module, report = run(FuseBatchNorm2dInConv2d(), by_fx(lambda m, x: m.all(x), all=model))
    assert len(report.changes) == 3
    assert [node.op for node in graph_module.graph.nodes] == ["placeholder", "call_module", "output"]


def test_an_endless_rule_is_stopped_and_the_graph_restored() -> None:
    class Forever(SwapSummands):
        def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
            return Match((node,)) if node.target is operator.add else None

    graph_module = _sums()
    before = graph_state(graph_module)
    with pytest.raises(TransformationError, match="Forever: match returns the same Match for add after rewrite"):
        Forever()(graph_module)
    assert graph_state(graph_module) == before


def test_a_failed_transformation_restores_the_graph() -> None:
    class Breaks(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            first, *_ = graph_module.graph.nodes
            self.mark_as_transformed(first)
            graph_module.add_module("more", nn.Linear(1, 1))
            graph_module.q.bias = None
            raise RuntimeError("on purpose")

    graph_module = _sums()
    before = graph_state(graph_module)
    with pytest.raises(RuntimeError, match="on purpose"):
        Breaks()(graph_module)
    assert graph_state(graph_module) == before
    assert not Breaks().get_transformed_nodes(graph_module)


def test_attribute_that_cannot_be_compared_is_one_clear_error() -> None:
    class Locks(Transformation):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def transform(self, graph_module: GraphModule) -> GraphModule:
            self.mark_as_transformed(next(iter(graph_module.graph.nodes)))
            return graph_module

    with pytest.raises(TransformationError, match="Locks: the attributes cannot be compared across processes"):
        Locks()(_sums())


class ScalesWeights(Transformation):
    """Computes weights without ``torch.no_grad``."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for module in graph_module.modules():
            if isinstance(module, nn.Linear):
                module._parameters["weight"] = module.weight * 2  # type: ignore[assignment]
        return graph_module


def test_a_weight_with_gradient_history_names_the_rule() -> None:
    with pytest.raises(TransformationError, match=r"q\.weight with a gradient history") as caught:
        run(ScalesWeights(), _sums())
    assert caught.value.location == "ScalesWeights"


def test_checks_of_an_exported_graph_do_not_warn() -> None:
    """A suite of a user that turns warnings into errors failed: torch deprecates how it copies output trees."""
    program = torch.export.export(nn.Linear(4, 2), (torch.randn(3, 4),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="LeafSpec"):
            copy.deepcopy(program.module())
        assert outputs(program.module(), torch.randn(3, 4))[0].shape == (3, 2)
        copy_sharing_modules(program.module())
