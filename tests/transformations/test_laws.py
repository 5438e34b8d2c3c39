"""The laws for all rules, alone and composed, on several models; and for broken rules."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.testing import check_laws, copy_sharing_modules
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FoldConstants,
    FoldNormAffine,
    FoldScale,
    FuseAttention,
    FuseBatchNorm,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBias,
    FuseBiasInLinear,
    Match,
    MergeLinearChain,
    MergeLinears,
    MergeParallelConvs,
    RemoveNoOps,
    ShareEqual,
    SinkSelect,
    Transformation,
    compose,
)
from optexport.transformations.analysis import folding
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Inherited, by_export, by_fx

RULES = (
    ChangeTrueDivToMulByInverse(),
    FoldConstants(),
    FoldNormAffine(),
    FoldScale(),
    FuseAttention(),
    FuseBatchNorm(),
    FuseBatchNorm1dInLinear(),
    FuseBatchNorm2dInConv2d(),
    FuseBias(),
    FuseBiasInLinear(),
    MergeLinearChain(),
    MergeLinears(),
    MergeParallelConvs(),
    RemoveNoOps(),
    ShareEqual(weights=True),
    SinkSelect(),
)
# These take the longest to trace.
MODELS = [pytest.param(n, marks=pytest.mark.slow) if n in ("bart", "groupvit") else n for n in models.NAMES]
X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-2, 2, 96).reshape(2, 3, 4, 4)


def _name(value: Any) -> str:
    return "-".join(type(t).__name__ for t in value) if isinstance(value, tuple) else type(value).__name__


@functools.cache
def _with_work_for_all() -> GraphModule:
    """Returns a graph that every rule matches. Tests share it, so none may change it."""

    def body(m: Any, x: torch.Tensor) -> Any:
        row = m.rows(x)[:, 0].sum((1, 2))
        x = m.three(x) + m.one(x) + x
        attended = (x @ x.transpose(2, 3) / 2).softmax(-1) @ x
        x = m.norm2d(m.conv(x)).mean((2, 3)) / 3
        x = m.norm1d(m.first(x.float()))
        twice = (x.tanh() + x.tanh()).sum()
        results = m.scaled(x) * 0.3 * m.more.exp(), m.read(m.norm(x)), m.alone(m.up(x / 7)) + m.more
        return m.q(x) * m.k(x) / 8 * twice, *results, row, attended

    return by_export(
        IMAGE,
        body,
        three=nn.Conv2d(3, 3, 3, padding=1),
        one=nn.Conv2d(3, 3, 1, bias=False),
        conv=nn.Conv2d(3, 5, 2),
        norm2d=nn.BatchNorm2d(5),
        first=nn.Linear(5, 4),
        norm1d=nn.BatchNorm1d(4),
        q=nn.Linear(4, 3),
        k=nn.Linear(4, 3, bias=False),
        up=nn.Linear(4, 6),
        alone=nn.Linear(6, 2),
        scaled=nn.Linear(4, 2),
        norm=nn.LayerNorm(4),
        read=nn.Linear(4, 2),
        more=nn.Parameter(torch.ones(2)),
        rows=nn.Linear(4, 3),
    )


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_every_rule_keeps_the_laws_on_every_model(rule: Transformation, name: str) -> None:
    check_laws(rule, models.traced(name), models.inputs(name))


def _pairs(name: str) -> list[tuple[Transformation, ...]]:
    at_work = [rule for rule in RULES if run(rule, copy_sharing_modules(models.traced(name)))[1].changes]
    return list(itertools.permutations(at_work, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", models.NAMES)
def test_some_pairs_of_rules_keep_the_laws_on_every_model(name: str) -> None:
    pairs = _pairs(name)
    for pair in random.Random(name).sample(pairs, min(3, len(pairs))):
        check_laws(compose(*pair), models.traced(name), models.inputs(name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", models.NAMES)
def test_all_pairs_of_rules_keep_the_laws_on_every_model(name: str) -> None:
    for pair in _pairs(name):
        check_laws(compose(*pair), models.traced(name), models.inputs(name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", models.NAMES)
def test_all_rules_together_keep_the_laws_on_every_model(name: str) -> None:
    check_laws(compose(*RULES), models.traced(name), models.inputs(name))
    check_laws(compose(*reversed(RULES), inplace=False), models.traced(name), models.inputs(name))


@pytest.mark.slow
def test_all_rules_have_matches_in_the_graph_for_every_order() -> None:
    for rule in RULES:
        _, report = run(rule, copy_sharing_modules(_with_work_for_all()))
        assert report.changes, rule


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_all_rules_keep_the_laws_in_random_orders(seed: int) -> None:
    graph_module, generator = _with_work_for_all(), random.Random(seed)
    for _ in range(2):
        check_laws(compose(*generator.sample(RULES, len(RULES))), graph_module, IMAGE)


@pytest.mark.nightly
def test_two_rules_keep_the_laws_in_every_order() -> None:
    graph_module = _with_work_for_all()
    for order in itertools.permutations(RULES, 2):
        check_laws(compose(*order), graph_module, IMAGE)


def test_many_sizes_agree_after_all_rules() -> None:
    transformed = compose(*RULES)(copy.deepcopy(models.traced("bert")))
    model = models.model("bert")
    for batch, sequence in itertools.product((1, 2, 8), (1, 3, 40)):
        inputs = models.inputs("bert", batch, sequence)
        with torch.no_grad():
            torch.testing.assert_close(transformed(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


# Rules with one deliberate mistake each, and the law that detects it.


class _SwapsTwoSlices(MergeLinears):
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        first, second = match.nodes
        rewritten = super().rewrite(graph_module, match)
        first.args, second.args = second.args, first.args
        return rewritten


class _WritesIntoTheWeights(FuseBiasInLinear):
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        graph_module.get_submodule(str(match.nodes[0].target)).weight.data[0, 0] += 1e-6  # type: ignore[union-attr]
        return super().rewrite(graph_module, match)


class _FreezesTheWeights(FuseBiasInLinear):
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        rewritten = super().rewrite(graph_module, match)
        graph_module.get_submodule(str(rewritten[0][0].target)).requires_grad_(False)
        return rewritten


class _DrawsRandomNumbers(ChangeTrueDivToMulByInverse):
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        torch.rand(1)
        return super().rewrite(graph_module, match)


class _InvertsTheInverse(ChangeTrueDivToMulByInverse):
    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        super().restore(graph_module, node, {**record, "divisor": 1 / node.args[1]})  # type: ignore[operator]


class _LeavesTheOrderOfModules(MergeLinears):
    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        super().restore(graph_module, node, {**record, "order": {}})


class _LosesTheBias(FuseBiasInLinear):
    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        super().restore(graph_module, node, record)
        graph_module.get_submodule(str(node.target)).bias.data.zero_()  # type: ignore[union-attr]


class _HooksTheModules(ChangeTrueDivToMulByInverse):
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        graph_module.get_submodule("q").register_forward_hook(lambda *_: None)
        return super().rewrite(graph_module, match)


@dataclass(frozen=True)
class _NeverHasEnough(ChangeTrueDivToMulByInverse):
    def match(self, graph_module: GraphModule, node: Node) -> Any:
        return super().match(graph_module, node)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_module"):
            with graph_module.graph.inserting_after(node):
                graph_module.graph.call_function(torch.neg, (node,))
        return graph_module


class _RemembersNodes(ChangeTrueDivToMulByInverse):
    nodes: dict[int, Any] = {}  # noqa: RUF012  the mistake is the point

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        rewritten = super().rewrite(graph_module, match)
        self.nodes[id(match.nodes[0])] = rewritten[0][1]
        return rewritten

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        if id(node) in self.nodes:
            super().restore(graph_module, node, record)


class _ForgetsTheMark(ChangeTrueDivToMulByInverse):
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        return graph_module


class _CopiesInAnotherDtype(FuseBiasInLinear):
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        rewritten = super().rewrite(graph_module, match)
        if rewritten[0][0].name != "rest":
            return rewritten
        with graph_module.graph.inserting_after(rewritten[0][0]):
            cast = graph_module.graph.call_method("double", (rewritten[0][0],))
        rewritten[0][0].replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        return rewritten


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (_SwapsTwoSlices(), "outputs must agree"),
        (_CopiesInAnotherDtype(), "output 0: wrong dtype or shape"),
        (_WritesIntoTheWeights(), "the caller's model must not change"),
        (_HooksTheModules(), "the caller's model must not change"),
        (_FreezesTheWeights(), "requires_grad of k.weight must not change"),
        (_DrawsRandomNumbers(), "random state must not change"),
        (_NeverHasEnough(), "a second application must change nothing"),
        (_InvertsTheInverse(), "undo: graph text differs"),
        (_ForgetsTheMark(), "undo: graph text differs"),
        (_LeavesTheOrderOfModules(), "undo: state_dict differs"),
        (_LosesTheBias(), "undo: state_dict differs"),
        (_RemembersNodes(), "undo: graph text differs"),
    ],
    ids=_name,
)
def test_a_broken_rule_fails_the_laws(broken: Transformation, law: str) -> None:
    layers = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 3), "rest": nn.Linear(3, 1)}
    graph_module = by_fx(lambda m, x: m.rest(m.k(x) - m.q(x)) / 49, **layers)
    with pytest.raises(AssertionError, match=law):
        check_laws(broken, graph_module, X)


def test_subclass_is_accepted_by_a_rule_that_expects_it() -> None:
    graph_module = by_fx(lambda m, x: m.q(x) - m.k(x), q=Inherited(4, 3), k=Inherited(4, 3))
    assert folding.find_plain_problem(graph_module.get_submodule("q"), Inherited) is None
