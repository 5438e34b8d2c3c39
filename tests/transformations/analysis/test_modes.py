"""Rules do not move work to another global state, such as autocast or no_grad."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from optexport import symbolic_trace
from optexport.testing import check_applied, check_laws, check_refused
from optexport.transformations import (
    CastPrecision,
    ChangeTrueDivToMulByInverse,
    FoldNormAffine,
    FoldScale,
    FuseAttention,
    FuseBatchNorm,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBias,
    FuseBiasInLinear,
    MergeLinearChain,
    MergeLinears,
    MergeParallelConvs,
    RemoveNoOps,
    ReplaceActivation,
    Rule,
    ShareEqual,
    SinkSelect,
)
from optexport.transformations.analysis.modes import find_mode_problem
from tests._helpers.graphs import Program, by_export, by_fx
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 12).reshape(3, 4)
ROWS = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
IMAGE = torch.linspace(-1, 1, 64).reshape(1, 4, 4, 4)
HEADS = torch.linspace(-1, 1, 256).reshape(1, 2, 8, 16)
APART = "another global state changes between"

CASES: dict[str, tuple[Rule, torch.Tensor, Callable[[Any, Any], Any], dict[str, nn.Module]]] = {
    "merge-linears": (MergeLinears(), X, lambda m, x: (m.a(x), m.b(x)), {}),
    "merge-linear-chain": (MergeLinearChain(), X, lambda m, x: m.b(m.a(x)), {}),
    "fuse-bias": (FuseBias(), X, lambda m, x: m.b(x) + 3, {}),
    "fold-scale after": (FoldScale(), X, lambda m, x: m.b(x) * 3, {}),
    "fold-scale before": (FoldScale(), X, lambda m, x: m.b(x * 3), {}),
    "fold-norm-affine": (FoldNormAffine(), X, lambda m, x: m.b(m.norm(x)), {"norm": nn.LayerNorm(4)}),
    "fuse-batch-norm": (FuseBatchNorm(), X, lambda m, x: m.norm(m.b(x)), {"norm": nn.BatchNorm1d(4)}),
    "fuse-batch-norm-1d": (FuseBatchNorm1dInLinear(), X, lambda m, x: m.norm(m.b(x)), {"norm": nn.BatchNorm1d(4)}),
    "fuse-batch-norm-2d": (
        FuseBatchNorm2dInConv2d(),
        IMAGE,
        lambda m, x: m.norm(m.b(x)),
        {"b": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)},
    ),
    "merge-parallel-convs": (
        MergeParallelConvs(),
        IMAGE,
        lambda m, x: m.a(x) + m.b(x),
        {"a": nn.Conv2d(4, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 1)},
    ),
    "fuse-attention": (
        FuseAttention(),
        HEADS,
        lambda m, x: torch.softmax(x @ (x * 2.0).mT * 0.5, -1) @ (x * 3.0),
        {},
    ),
    "sink-select": (SinkSelect(), ROWS, lambda m, x: m.b(m.a(x))[:, 0], {}),
    "remove-no-ops": (RemoveNoOps(), ROWS, lambda m, x: x.tanh().reshape(2, 3, 4) * 2, {}),
    "share-equal": (ShareEqual(), X, lambda m, x: x.tanh() - x.tanh() * 2, {}),
}
# Rules that replace weights. The dtype of the weights must be the dtype of the result.
FOLDING = [name for name in CASES if name.startswith(("fuse-b", "fold", "merge-linear-chain", "merge-parallel"))]


def _graph(name: str) -> tuple[Rule, fx.GraphModule, torch.Tensor]:
    rule, x, body, children = CASES[name]
    linears = {"a": nn.Linear(4, 4) if name != "merge-linear-chain" else nn.Linear(4, 1), "b": nn.Linear(4, 4)}
    if name == "merge-linear-chain":
        linears["b"] = nn.Linear(1, 1)
    program = randomise(Program(body, **{**linears, **children}))
    return rule, symbolic_trace(program, example_inputs={"x": x}, dynamic={}), x


def _around(graph_module: fx.GraphModule, first: fx.Node, last: fx.Node) -> None:
    """Puts the nodes between two nodes under autocast."""
    graph = graph_module.graph
    with graph.inserting_before(first):
        entered = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, None))
    with graph.inserting_after(last):
        graph.call_function(_exit_autocast, (entered,))
    graph_module.recompile()


def _inner(graph_module: fx.GraphModule, name: str) -> fx.Node:
    """Returns the node that the rule matches."""
    names = {"fuse-attention": "softmax", "remove-no-ops": "reshape", "share-equal": "tanh_1"}
    by_name = {node.name: node for node in graph_module.graph.nodes}
    if name in names:
        return next(by_name[key] for key in by_name if key.startswith((names[name], "view")))
    return next(node for node in by_name.values() if node.op == "call_module" and node.target == "b")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_without_a_region_the_rule_applies(name: str) -> None:
    check_applied(*_graph(name))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_no_work_is_moved_into_or_out_of_autocast(name: str) -> None:
    rule, graph_module, x = _graph(name)
    inner = _inner(graph_module, name)
    _around(graph_module, inner, inner)
    reason = "the module is called under autocast" if name in FOLDING else APART
    check_refused(rule, graph_module, x, reason)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FOLDING)
def test_a_layer_under_autocast_keeps_its_weights(name: str) -> None:
    rule, graph_module, x = _graph(name)
    first = next(node for node in graph_module.graph.nodes if node.op not in ("placeholder", "get_attr"))
    _around(graph_module, first, graph_module.graph.output_node().prev)
    check_refused(rule, graph_module, x, "the module is called under autocast")


def test_linears_are_merged_within_and_around_a_region() -> None:
    _, inside, _ = _graph("merge-linears")
    linears = inside.graph.find_nodes(op="call_module")
    _around(inside, *linears)
    check_applied(MergeLinears(), inside, X)
    between = by_export(X, lambda m, x: (m.a(x), x @ x.mT, m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    (product,) = between.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    _around(between, product, product)
    check_applied(MergeLinears(), between, X)


def test_a_division_becomes_a_product_in_any_state() -> None:
    graph_module = by_export(X, lambda m, x: x / 4 + 1)
    (division,) = graph_module.graph.find_nodes(op="call_function", target=operator.truediv)
    _around(graph_module, division, division)
    check_applied(ChangeTrueDivToMulByInverse(), graph_module, X)


def test_factor_in_another_state_is_not_part_of_attention() -> None:
    rule, graph_module, x = _graph("fuse-attention")
    factor = next(node for node in graph_module.graph.nodes if node.target is operator.mul)
    _around(graph_module, factor, factor)
    check_refused(rule, graph_module, x, APART)


def enter_something() -> None:
    """A foreign function without arguments or result, which can only have side effects."""


SWITCHES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "set_grad_enabled": (torch.set_grad_enabled, (False,)),
    "_set_grad_enabled": (torch._C._set_grad_enabled, (False,)),
    "set_default_dtype": (torch.set_default_dtype, (torch.float64,)),
    "set_autocast_enabled": (torch.set_autocast_enabled, ("cpu", True)),
    "deterministic": (torch.use_deterministic_algorithms, (True,)),
    "precision": (torch.set_float32_matmul_precision, ("medium",)),
    "foreign": (enter_something, ()),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_of_a_global_state_keeps_linears_apart(name: str) -> None:
    graph_module = by_fx(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    first, _ = graph_module.graph.find_nodes(op="call_module")
    with graph_module.graph.inserting_after(first):
        graph_module.graph.call_function(*SWITCHES[name])
    check_refused(MergeLinears(), graph_module, None, APART)


def test_overridden_and_nested_states() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = []

    def switch(function: Any, *args: Any) -> fx.Node:
        switched = graph.call_function(function, args)
        nodes.append(graph.call_function(torch.neg, (x,)))
        return switched

    for enabled in (False, True, False):
        switch(torch.set_grad_enabled, enabled)
    outer = switch(_enter_autocast, "cpu", torch.bfloat16, True, None)
    inner = switch(_enter_autocast, "cpu", torch.float16, True, None)
    switch(_exit_autocast, inner)
    switch(_exit_autocast, outer)
    graph.output(tuple(nodes))
    graph_module = fx.GraphModule(nn.Module(), graph)
    equal = [[find_mode_problem(graph_module, (first, second)) is None for second in nodes] for first in nodes]
    states = "ABACDCA"  # without gradients, with, without; then in one region, in two, in one, in none
    assert equal == [[first == second for second in states] for first in states]


def test_states_of_two_devices_are_independent() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.neg, (x,))]
    for device, enabled in (("cpu", True), ("cuda", False), ("cpu", False), ("cuda", False)):
        graph.call_function(torch.set_autocast_enabled, (device, enabled))
        nodes.append(graph.call_function(torch.neg, (x,)))
    graph.output(tuple(nodes))
    graph_module = fx.GraphModule(nn.Module(), graph)
    assert find_mode_problem(graph_module, (nodes[2], nodes[4])) is not None


REGIONS: dict[str, Callable[[Any, Any], Any]] = {
    "merge-linears": lambda m, x: m.a(x) + m.b(x) * 2,
    "fuse-bias": lambda m, x: m.a(x) * 2 + 3,
    "chain": lambda m, x: m.b(m.a(x) * 0.5),
    "sink-select": lambda m, x: m.b(m.a(x).relu())[0],
    "no-ops": lambda m, x: x.reshape(3, 4).contiguous() / 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
def test_operators_within_torch_vmap_keep_the_laws(name: str) -> None:
    body = lambda m, x: torch.vmap(lambda row: REGIONS[name](m, row))(x)  # noqa: E731
    graph_module = by_export(ROWS, body, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    for rule in (*(rule for rule, *_ in CASES.values()), FuseBiasInLinear(), CastPrecision(), ReplaceActivation()):
        if rule.preserves_computation:
            check_laws(rule, graph_module, ROWS)


def test_work_before_and_after_torch_vmap_has_one_state() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return m.a(x), torch.vmap(torch.tanh)(x), m.b(x)

    graph_module = by_export(X, body, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    check_applied(MergeLinears(), graph_module, X)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["autocast", "condition"])
def test_nested_graphs_keep_the_laws(name: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        if name == "condition":
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), m.a(x), m.b(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.mT
        return y, m.a(x), m.b(x)

    graph_module = by_export(X, body, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    has_region = any(isinstance(part, fx.GraphModule) for _, part in graph_module.named_children())
    assert has_region == (name == "condition"), "only a condition has graphs of its own"
    check_applied(MergeLinears(), graph_module, X)
