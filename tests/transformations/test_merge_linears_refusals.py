"""MergeLinears: every reason to skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, skip_init, weight_norm

from optexport.testing import check_applied, check_laws, check_refused, check_undo_alone
from optexport.transformations import FuseBatchNorm1dInLinear, MergeLinears
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Inherited, Program, by_export, by_fx, calls, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


def _sum(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.q(x) - 2 * m.k(x)


def _layers() -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(4, 4), nn.Linear(4, 4)


def test_other_nodes_and_single_linears_are_ignored() -> None:
    check_refused(MergeLinears(), by_fx(lambda m, x: m.q(x) + m.norm(x), q=nn.Linear(4, 4), norm=nn.LayerNorm(4)), X)
    check_refused(MergeLinears(), models.traced("resnet"), None)


def test_a_subclass_is_skipped() -> None:
    graph_module = by_fx(_sum, q=Inherited(4, 4), k=nn.Linear(4, 4))
    check_refused(MergeLinears(), graph_module, X, "q: Inherited is a subclass of Linear")


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_linear_with_hooks_is_skipped(kind: str) -> None:
    program = randomise(Program(_sum, q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    getattr(program.q, f"register_{kind}_hook")(lambda *values: None)
    check_refused(MergeLinears(), graph_of(program), X, "q: the module has hooks")


def test_linear_with_a_replaced_forward_is_skipped() -> None:
    program = randomise(Program(_sum, q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    weight = program.q.weight
    program.q.forward = lambda x: F.linear(x, weight * 2)  # like offloading libraries
    check_refused(MergeLinears(), graph_of(program), X, "q: ")


def _old_weight_norm(linear: nn.Linear) -> nn.Linear:
    with pytest.warns(FutureWarning), torch.no_grad():
        return weight_norm(linear)


def _pruned(linear: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        prune.l1_unstructured(linear, "weight", amount=0.5)
    return linear


def _parametrized(linear: nn.Linear) -> nn.Linear:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    parametrize.register_parametrization(linear, "bias", Doubled())
    return linear


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (parametrizations.weight_norm, "q: ParametrizedLinear is a subclass of Linear"),
        (_old_weight_norm, "q: the module has hooks"),
        (_pruned, "q: the module has hooks"),
        (_parametrized, "q: ParametrizedLinear is a subclass of Linear"),
    ],
)
def test_a_parametrized_linear_is_skipped(how: Callable[[nn.Linear], nn.Linear], reason: str) -> None:
    check_refused(MergeLinears(), by_fx(_sum, q=how(nn.Linear(4, 4)), k=nn.Linear(4, 4)), X, reason)


def test_a_linear_under_two_names_is_skipped() -> None:
    program = randomise(Program(lambda m, x: _sum(m, x) + m.q(x.neg()), q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    graph = graph_of(program).graph
    graph.find_nodes(op="call_module", target="q")[1].target = "alias"
    program.alias = program.q
    check_refused(MergeLinears(), GraphModule(program, graph), X, "q: the same module has the names alias and q")


def test_linear_with_a_tied_weight_is_skipped() -> None:
    layers = {name: nn.Linear(4, 4) for name in ("q", "k", "other")}
    layers["other"].weight = layers["q"].weight
    graph_module = by_fx(lambda m, x: _sum(m, x) + m.other(x.neg()), **layers)
    check_refused(MergeLinears(), graph_module, X, "q: the weight is tied to other.weight")


def test_head_tied_to_the_embedding_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = m.embed(x)
        return m.head(hidden), m.other(hidden)

    program = randomise(Program(body, embed=nn.Embedding(9, 4), head=nn.Linear(4, 9), other=nn.Linear(4, 2)))
    program.head.weight = program.embed.weight
    check_refused(MergeLinears(), graph_of(program), torch.arange(6), "head: the weight is tied to embed.weight")


def test_linear_with_a_weight_read_elsewhere_is_skipped() -> None:
    graph_module = by_fx(lambda m, x: _sum(m, x) @ m.q.weight, q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    check_refused(MergeLinears(), graph_module, X, "q: the graph also reads the weight directly")


def test_a_linear_that_is_also_called_alone_is_skipped() -> None:
    graph_module = by_fx(lambda m, x: _sum(m, x) + m.q(x.neg()), q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    check_refused(MergeLinears(), graph_module, X, "q, k: the linears differ in inputs")


def test_a_linear_called_twice_with_one_input_is_skipped() -> None:
    graph_module = by_fx(lambda m, x: _sum(m, x) + m.q(x), q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    check_refused(MergeLinears(), graph_module, X, "q: the module is called twice with the same input")


def test_call_without_a_single_tensor_is_skipped() -> None:
    graph_module = by_fx(_sum, q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    (call,) = graph_module.graph.find_nodes(op="call_module", target="q")
    call.args = ((call.args[0],),)
    graph_module.recompile()
    check_refused(MergeLinears(), graph_module, None, "q: the module is not called with a single tensor")


def test_linears_of_different_dtypes_are_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.q(x) - m.k(x).double()

    program = randomise(Program(body, q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    program.k.double()
    check_refused(MergeLinears(), graph_of(program), None, "q, k: the linears differ in inputs, dtype")


def test_linears_on_different_devices_are_skipped() -> None:
    program = Program(_sum, q=nn.Linear(4, 4), k=skip_init(nn.Linear, 4, 4, device="meta"))
    graph_module = graph_of(program)
    text = str(graph_module.graph)
    assert str(MergeLinears()(graph_module).graph) == text


def test_partly_frozen_linear_is_skipped() -> None:
    q, k = _layers()
    q.bias.requires_grad_(False)
    check_refused(MergeLinears(), by_fx(_sum, q=q, k=k), X, "q: the weight and bias differ in requires_grad")


def test_a_linear_with_a_transposed_weight_is_skipped() -> None:
    program = randomise(Program(_sum, q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    program.q.weight = nn.Parameter(program.q.weight.detach().t())
    check_refused(MergeLinears(), graph_of(program), X, "q: the weight or bias is not contiguous")


def test_linear_with_a_slice_as_its_bias_is_skipped() -> None:
    program = randomise(Program(_sum, q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    program.q.bias = nn.Parameter(torch.randn(4, 3)[:, 1])
    check_refused(MergeLinears(), graph_of(program), None, "q: the weight or bias is not contiguous")


def test_frozen_and_trained_linears_are_skipped() -> None:
    q, k = _layers()
    check_refused(MergeLinears(), by_fx(_sum, q=q.requires_grad_(False), k=k), X, "q, k: the linears differ in")


def test_a_linear_with_a_tied_bias_is_skipped() -> None:
    layers = {name: nn.Linear(4, 4) for name in ("q", "k", "other")}
    layers["other"].bias = layers["k"].bias
    graph_module = by_fx(lambda m, x: _sum(m, x) + m.other(x.neg()), **layers)
    check_refused(MergeLinears(), graph_module, X, "k: the bias is tied to other.bias")


# In-place changes of the input between the two calls.
_CHANGES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "method": lambda m, x: x.add_(1),
    "function": lambda m, x: torch.relu_(x),
    "inplace keyword": lambda m, x: F.relu(x, inplace=True),
    "out keyword": lambda m, x: torch.add(x, 1, out=x),
    "setitem": lambda m, x: x.__setitem__((0, 0), 7.0),
    "module": lambda m, x: m.act(x),
    "view": lambda m, x: x.view(-1).add_(1),
    "transposed": lambda m, x: x.mT.add_(1),
    "part": lambda m, x: x[0].add_(1),
    "chunk": lambda m, x: x.chunk(2)[1].add_(1),
    "unbind": lambda m, x: x.unbind(0)[0].add_(1),
    "diagonal": lambda m, x: x[0].diagonal().add_(1),
    "unfold": lambda m, x: x.unfold(2, 2, 2).add_(1),
    "function of view": lambda m, x: torch.narrow(x, 0, 0, 1).mul_(2),
    "identity": lambda m, x: m.identity(x).add_(1),
    "dropout": lambda m, x: F.dropout(x, training=False).add_(1),
    "alpha dropout": lambda m, x: m.alpha_dropout(x).add_(1),
    "same dtype": lambda m, x: x.to(torch.float32).add_(1),
    "swapped": lambda m, x: x.swapdims(0, 1).add_(1),
    "ravelled": lambda m, x: x.ravel().add_(1),
    "keyword": lambda m, x: torch.relu_(input=x),
    "positional flag": lambda m, x: F.relu(x, True),
    "view by keyword": lambda m, x: torch.flatten(input=x).mul_(2),
    "second of several views": lambda m, x: torch.broadcast_tensors(x[:1] * 2, x)[1].mul_(2),
    "one of several outs": lambda m, x: torch.max(x + 1, 1, out=(x[:, 0], x.argmax(1))),
    "in a list": lambda m, x: torch._foreach_add_([x], 1.0),
}


_CHILDREN = {"act": nn.ReLU(inplace=True), "identity": nn.Identity(), "alpha_dropout": nn.AlphaDropout()}


def _changed_between(m: Any, x: torch.Tensor, change: str) -> torch.Tensor:
    x = x * 2 + 1
    q = m.q(x)
    _CHANGES[change](m, x)
    return q - m.k(x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", _CHANGES)
def test_change_of_the_input_between_two_linears_is_detected(change: str) -> None:
    q, k = _layers()
    graph_module = by_fx(lambda m, x: _changed_between(m, x, change), q=q, k=k, **_CHILDREN)
    check_laws(MergeLinears(), graph_module, X, exact=True)
    check_refused(MergeLinears(), graph_module, X, "is changed in place by")


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", sorted(_CHANGES.keys() - {"keyword"}))
def test_an_input_change_between_linears_after_export(change: str) -> None:
    q, k = _layers()
    graph_module = by_export(X, lambda m, x: _changed_between(m, x, change), q=q, k=k, **_CHILDREN)
    check_laws(MergeLinears(), graph_module, X, exact=True)
    assert len(calls(MergeLinears()(graph_module), nn.Linear)) == 2


@pytest.mark.parametrize("exported", [False, True])
def test_change_of_the_base_of_the_input_is_detected(exported: bool) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        part = base[:, :2]
        q = m.q(part)
        base.sub_(3)
        return q - m.k(part)

    q, k = _layers()
    graph_module = by_export(X, body, q=q, k=k) if exported else by_fx(body, q=q, k=k)
    check_refused(MergeLinears(), graph_module, X, "is changed in place by")


# Shapes that a view of a contiguous result may have, but not of a slice.
_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda y: y.view(-1),
    "flat tuple": lambda y: y.view((-1,)),
    "rows joined": lambda y: y.view(2, 12),
    "after unsqueeze": lambda y: y.unsqueeze(0).view(-1),
    "after select": lambda y: y[0].view(-1),
    "after detach": lambda y: y.detach().view(-1),
    "after dropout": lambda y: F.dropout(y, training=False).view(-1),
    "after heads": lambda y: y.view(2, 3, 2, 2).view(-1),
    "after in-place": lambda y: y.relu_().view(-1),
    "strided": lambda y: y.as_strided((4, 6), (6, 1)),
    "like another": lambda y: y.view_as(torch.empty(4, 6)),
    "after reshape": lambda y: y.reshape(2, 3, 2, 2).view(-1),
    "after flatten": lambda y: y.flatten(0, 1).view(-1),
    "complex after reshape": lambda y: torch.view_as_complex(y.reshape(2, 3, 2, 2)).abs(),
    "bytes": lambda y: y.view(torch.int32).view(-1).to(torch.float32),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", _VIEWS)
@pytest.mark.parametrize("how", ["fx", "export"])
def test_a_result_with_a_strict_view_is_skipped(how: str, view: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return _VIEWS[view](m.q(x)).sum() - m.k(x)

    q, k = _layers()
    graph_module = by_fx(body, q=q, k=k) if how == "fx" else by_export(X, body, q=q, k=k)
    check_refused(MergeLinears(), graph_module, X, "in a shape that a slice does not allow")


def test_a_result_viewed_as_complex_is_right_or_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(m.q(x).view(2, 3, 2, 2)).abs().sum() + m.k(x).sum()

    check_laws(MergeLinears(), by_fx(body, q=nn.Linear(4, 4), k=nn.Linear(4, 3)), X)


def test_a_result_that_is_detached_in_place_is_skipped() -> None:
    layers = {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}
    graph_module = by_fx(lambda m, x: m.q(x).detach_() - m.k(x), **layers)
    check_refused(MergeLinears(), graph_module, X[0], "detach_ may view the result of q")


def test_result_with_a_view_of_only_its_size_is_merged() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        q, k = m.q(x), m.k(x)
        return q + 1, k.view(q.size(0), q.shape[1], 2, 2) + 1

    check_applied(MergeLinears(), by_fx(body, q=nn.Linear(4, 4), k=nn.Linear(4, 4)), X)


@pytest.mark.slow
@pytest.mark.parametrize("step", [lambda q: torch.mul(q, torch.sigmoid(q)), lambda q: q.relu()])
def test_long_path_from_a_result_is_followed_once(step: Callable[[Any], Any]) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        q = m.q(x)
        for _ in range(1100):
            q = step(q)
        return q - m.k(x)

    _, report = run(MergeLinears(), by_fx(body, q=nn.Linear(4, 4), k=nn.Linear(4, 4)))
    assert len(report.changes) == 1


def test_skipped_linear_does_not_prevent_other_merges() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.q(x) + m.k(x) + m.odd(x)

    graph_module = by_fx(body, q=nn.Linear(4, 4), odd=Inherited(4, 4), k=nn.Linear(4, 4))
    report = check_applied(MergeLinears(), graph_module, X)
    assert report.changes[0].replaced == ("q", "k")
    assert [near_miss.node for near_miss in report.near_misses] == ["x"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("biased", [(False, False), (True, False), (True, True)])
def test_undo_after_folding_a_norm_keeps_the_shift_or_fails(biased: tuple[bool, bool]) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.norm(x)
        return m.q(x) - 2 * m.k(x)

    q, k = (nn.Linear(4, 4, bias=bias) for bias in biased)
    graph_module = by_export(X[0], body, norm=nn.BatchNorm1d(4), q=q, k=k)
    check_undo_alone([MergeLinears(), FuseBatchNorm1dInLinear()], graph_module, X[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["reshape", "flatten", "contiguous"])
@pytest.mark.parametrize("trace", ["fx", "export"])
def test_a_result_changed_through_a_view_is_detected(how: str, trace: str) -> None:
    """It is a view of a whole result, but a copy of a slice."""

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k = m.q(x), m.k(x)
        (q.reshape(-1) if how == "reshape" else q.flatten() if how == "flatten" else q.contiguous()).add_(1.0)
        return q * k

    children = {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}
    graph_module = by_fx(body, **children) if trace == "fx" else by_export(X, body, **children)
    check_laws(MergeLinears(), graph_module, X)
