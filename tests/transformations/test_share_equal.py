"""ShareEqual computes equal results once."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from optexport import symbolic_trace
from optexport.testing import check_applied, check_laws, check_refused, copy_sharing_modules
from optexport.transformations import MergeLinears, RemoveNoOps, ShareEqual, SinkSelect, compose
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Inherited, Program, by_export, by_fx, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 12).reshape(3, 4)
aten = torch.ops.aten


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x.tanh() - x.tanh() * 2,
        lambda m, x: (x + 1) @ (x + 1).t(),
        lambda m, x: x.softmax(-1) - x.softmax(-1) * x,
        lambda m, x: x + torch.arange(4) - torch.arange(4) * x,
        lambda m, x: x[:, 1:] - x[:, 1:] * 2,
        lambda m, x: x.max(1)[0] - x.max(1)[0] * 2,
    ],
)
def test_equal_calls_become_one(body: Any) -> None:
    graph_module = by_export(X, body)
    check_laws(ShareEqual(), graph_module, X, exact=True)
    changed, report = run(ShareEqual(), copy_sharing_modules(graph_module))
    assert report.changes
    computed = [
        (node.target, str(node.args), str(node.kwargs))
        for node in changed.graph.nodes
        if node.users and node.op == "call_function"
    ]
    assert len(computed) == len(set(computed))


def test_whole_subgraphs_become_one() -> None:
    def part(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(m.layer(x.view(2, 6)) * 2)

    graph_module = by_export(X.reshape(2, 6), lambda m, x: part(m, x).exp() + part(m, x).tanh(), layer=nn.Linear(6, 4))
    check_laws(ShareEqual(), graph_module, X.reshape(2, 6), exact=True)
    changed, _ = run(ShareEqual(), copy_sharing_modules(graph_module))
    assert len(changed.graph.find_nodes(op="call_module", target="layer")) == 1
    assert len(changed.graph.find_nodes(op="call_function", target=aten.gelu.default)) == 1


def test_layer_called_by_position_and_keyword_is_called_once() -> None:
    graph_module = by_fx(lambda m, x: m.layer(x) - m.layer(input=x) * 2, layer=nn.Linear(4, 4))
    check_applied(ShareEqual(), graph_module, X, exact=True)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x.tanh() + x.exp(),
        lambda m, x: (x + 1) * (x + 2),
        lambda m, x: aten.add.Tensor(x, 1) * aten.add.Tensor(x, 1.0),
        lambda m, x: x / 0.0 + x / -0.0,
        lambda m, x: x + aten.arange.default(4) + aten.arange.default(4.0) + aten.arange.default(True),
        lambda m, x: m.one(x) + m.two(x),
        lambda m, x: F.dropout(x, 0.5, training=True) + F.dropout(x, 0.5, training=True),
        lambda m, x: aten.dropout.default(x, 0.5, True) + aten.dropout.default(x, 0.5, True),
        lambda m, x: aten.rand_like.default(x) - aten.rand_like.default(x),
        lambda m, x: aten.empty_like.default(x) * 0 + aten.empty_like.default(x) * 0,
    ],
)
def test_different_and_random_calls_stay(body: Any) -> None:
    graph_module = by_fx(body, one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    _, report = run(ShareEqual(), copy_sharing_modules(graph_module))
    assert not report.changes
    assert not report.near_misses


def test_batch_norm_in_train_mode_and_subclasses_stay() -> None:
    graph_module = by_fx(lambda m, x: m.norm(x) - m.norm(x) * 2, norm=nn.BatchNorm1d(4))
    check_applied(ShareEqual(), graph_module, X, exact=True)
    learning = copy.deepcopy(graph_module)
    learning.get_submodule("norm").train()
    check_refused(ShareEqual(), learning, X)
    check_refused(ShareEqual(), by_fx(lambda m, x: m.l(x) - m.l(x) * 2, l=Inherited(4, 4)), X)
    hooked = by_fx(lambda m, x: m.l(x) - m.l(x) * 2, l=nn.Linear(4, 4))
    hooked.get_submodule("l").register_forward_hook(lambda module, args, result: result * 2)
    check_refused(ShareEqual(), hooked, X)
    rescaling = nn.Embedding(3, 4, max_norm=0.1)
    twice = graph_of(_Twice(rescaling))
    check_refused(ShareEqual(), twice, torch.tensor([0, 1]))


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) - self.layer(x) * 2


def test_results_that_are_changed_in_place_stay_apart() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y, z = x.tanh(), x.tanh()
        y.add_(1.0)
        return y * 2 - z

    check_refused(ShareEqual(), by_export(X, body), X, "tanh and tanh_1: the results are changed in place")


def test_a_result_with_a_view_changed_in_place_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y, z = x.tanh(), x.tanh()
        y[0].add_(1.0)
        return y * 2 - z

    check_refused(ShareEqual(), by_export(X, body), X, "the results are changed in place")


def test_input_changed_in_between_gives_another_result() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y = aten.tanh.default(x)
        x.add_(1.0)
        return y - aten.tanh.default(x)

    check_refused(ShareEqual(), by_export(X, body), X)  # this reads the result of add_
    check_refused(ShareEqual(), by_fx(body), X, "mul is changed in place by add_ between the two")


def test_weights_changed_in_between_give_another_result() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.layer(x)
        m.layer.weight.detach().add_(1.0)
        return y - m.layer(x)

    check_refused(ShareEqual(), by_fx(body, layer=nn.Linear(4, 4)), X, "the weights are changed in place")


@pytest.mark.slow
def test_two_outputs_stay_two_tensors() -> None:
    graph_module = by_export(X, lambda m, x: (x.tanh(), x.tanh()))
    check_refused(ShareEqual(), graph_module, X, "both are outputs, or share memory with outputs")
    views = by_export(X, lambda m, x: (x.tanh()[0], x.tanh()[1]))
    check_refused(ShareEqual(), views, X, "both are outputs, or share memory with outputs")
    one = by_export(X, lambda m, x: (x.tanh(), x.tanh() * 2))
    check_applied(ShareEqual(), one, X, exact=True)


def _with_ones(body: Any) -> GraphModule:
    ones = {name: nn.Parameter(torch.ones(4)) for name in ("one", "two", "three")}
    return symbolic_trace(Program(body, **ones), example_inputs={"x": X})


@pytest.mark.slow
def test_equal_weights_that_are_outputs_stay_separate() -> None:
    def check(body: Any, names: str) -> None:
        check_refused(
            ShareEqual(weights=True), _with_ones(body), X, f"{names} are equal, but share memory with outputs"
        )

    check(lambda m, x: (m.one, m.two.view(2, 2), x + 1), "one and two")
    check(lambda m, x: (m.one, x * m.two), "one and two")
    changed, report = run(ShareEqual(weights=True), _with_ones(lambda m, x: (m.three, x * m.one + m.two)))
    assert [len(report.changes), len(report.near_misses)] == [1, 1]
    assert changed.one is changed.two is not changed.three
    changed(X)[0].data.zero_()
    assert changed.one.sum() == 4
    tied = _with_ones(lambda m, x: (m.one, x * m.two + m.three))
    tied.two = tied.one
    check_refused(ShareEqual(weights=True), tied, X, "one and three are equal, but share memory with outputs")


def test_another_grad_mode_keeps_calls_apart() -> None:
    graph_module = by_fx(lambda m, x: m.layer(x) - m.layer(x) * 2, layer=nn.Linear(4, 4))
    first, second = graph_module.graph.find_nodes(op="call_module", target="layer")
    with graph_module.graph.inserting_after(first):
        graph_module.graph.call_function(torch._C._set_grad_enabled, (False,))
    graph_module.recompile()
    check_refused(
        ShareEqual(),
        graph_module,
        None,
        "the grad mode, autocast or another global state changes between layer and layer_1",
    )
    torch.set_grad_enabled(True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_dtypes_and_empty_tensors(dtype: torch.dtype) -> None:
    graph_module = by_export(X.to(dtype), lambda m, x: (x + 1) * (x + 1))
    check_applied(ShareEqual(), graph_module, X.to(dtype), exact=True)
    check_laws(ShareEqual(), graph_module, X[:0].to(dtype), exact=True)


def _equal_layers(body: Any) -> GraphModule:
    graph_module = by_fx(body, one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    graph_module.get_submodule("two").load_state_dict(graph_module.get_submodule("one").state_dict())
    return graph_module


def test_equal_weights_stay_separate_by_default() -> None:
    graph_module = _equal_layers(lambda m, x: m.two(m.one(x).tanh()))
    check_refused(ShareEqual(), graph_module, X)


def test_equal_weights_become_one_under_both_names() -> None:
    graph_module = _equal_layers(lambda m, x: m.two(m.one(x).tanh()))
    check_applied(ShareEqual(weights=True), graph_module, X, exact=True)
    changed, _ = run(ShareEqual(weights=True), copy_sharing_modules(graph_module))
    assert list(changed.state_dict()) == list(graph_module.state_dict())
    assert changed.get_parameter("two.weight") is changed.get_parameter("one.weight")
    assert len(list(changed.parameters())) == 2
    assert len(list(graph_module.parameters())) == 4


def test_equal_read_parameter_and_equal_buffers() -> None:
    graph_module = _read()
    check_applied(ShareEqual(weights=True), graph_module, X, exact=True)
    changed, _ = run(ShareEqual(weights=True), copy_sharing_modules(graph_module))
    assert changed.get_parameter("p") is changed.get_parameter("inner.p")
    assert changed.get_buffer("norm.running_mean") is changed.get_buffer("norm2.running_mean")


def _read() -> GraphModule:
    inner = nn.Module()
    inner.p = nn.Parameter(torch.ones(4))
    graph_module = by_fx(
        lambda m, x: m.norm(x) * m.p - m.norm2(x * m.inner.p),
        p=nn.Parameter(torch.ones(4)),
        inner=inner,
        norm=nn.BatchNorm1d(4),
        norm2=nn.BatchNorm1d(4),
    )
    graph_module.get_submodule("norm2").load_state_dict(graph_module.get_submodule("norm").state_dict())
    with torch.no_grad():
        graph_module.get_parameter("inner.p").copy_(graph_module.get_parameter("p"))
    return graph_module


@pytest.mark.parametrize("difference", ["bits", "zero", "dtype", "requires_grad", "strides", "hooks", "train"])
def test_weights_that_differ_in_any_property_stay(difference: str) -> None:
    graph_module = _equal_layers(lambda m, x: m.two(m.one(x).tanh()))
    two = graph_module.get_submodule("two")
    assert isinstance(two, nn.Linear)
    one = graph_module.get_submodule("one")
    weight = two.weight.detach().clone()
    match difference:
        case "bits":
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        case "zero":
            one.weight.data[0, 0] = 0.0  # type: ignore[index, union-attr]
            weight[0, 0] = -0.0
        case "dtype":
            weight = weight.double()
        case "strides":
            weight = weight.t().contiguous().t()
        case "hooks":
            two.register_forward_hook(lambda module, args, result: result * 2)
    two.weight = nn.Parameter(weight, requires_grad=difference != "requires_grad")
    two.bias = nn.Parameter(two.bias.detach() + (0 if difference in ("hooks", "train") else 1))
    if difference == "train":
        graph_module = by_fx(lambda m, x: m.one(x) + m.two(x), one=nn.BatchNorm1d(4), two=nn.BatchNorm1d(4))
        graph_module.get_submodule("two").load_state_dict(graph_module.get_submodule("one").state_dict())
        graph_module.get_submodule("two").train()
    check_refused(ShareEqual(weights=True), graph_module, None if difference == "dtype" else X)


def test_weights_that_the_graph_changes_stay_apart() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.one(x)
        m.one.weight.detach().add_(1.0)
        return m.two(y)

    graph_module = _equal_layers(body)
    changed, _ = run(ShareEqual(weights=True), copy_sharing_modules(graph_module))
    assert changed.get_parameter("one.weight") is not changed.get_parameter("two.weight")
    check_laws(ShareEqual(weights=True), graph_module, X, exact=True)


def test_a_tie_stays_a_tie() -> None:
    one, two, three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    graph_module = by_fx(lambda m, x: m.three(m.two(m.one(x))), one=one, two=two, three=three)
    three.load_state_dict(one.state_dict())
    changed, _ = run(ShareEqual(weights=True), copy_sharing_modules(graph_module))
    assert changed.get_parameter("one.weight") is changed.get_parameter("two.weight")
    check_laws(ShareEqual(weights=True), graph_module, X, exact=True)


def test_undo_of_an_earlier_selection_is_right_or_refused() -> None:
    graph_module = models.traced("bert")
    for rules in ((SinkSelect(), ShareEqual()), (ShareEqual(), SinkSelect()), (MergeLinears(), ShareEqual())):
        check_laws(compose(*rules), graph_module, models.inputs("bert"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "places"), [("bert", 4), ("bart", 31), ("t5", 35), ("llama", 9), ("resnet", 0)])
def test_models(name: str, places: int) -> None:
    _, report = run(ShareEqual(), copy_sharing_modules(models.traced(name)))
    assert len(report.changes) == places
    check_laws(compose(RemoveNoOps(), ShareEqual(weights=True)), models.traced(name), models.inputs(name), exact=True)


def test_tuple_and_list_indices_differ() -> None:
    graph_module = by_fx(lambda m, x: x[0, 1] * 2 + x[[0, 1]] * 2)
    check_refused(ShareEqual(), graph_module, X)
    assert run(ShareEqual(), by_fx(lambda m, x: x[[0, 1]] * 2 - x[[0, 1]]))[1].changes


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_in_place_operators_are_recognized_as_methods_too(name: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        one = y + 1
        getattr(y, f"__i{name}__")(3.0)
        return one - (y + 1)

    original = by_fx(body)
    in_place = next(node for node in original.graph.nodes if node.target == f"__i{name}__")
    check_refused(ShareEqual(), original, X, "mul is changed in place by")
    in_place.op, in_place.target = "call_function", getattr(operator, f"i{name}")
    original.recompile()
    check_refused(ShareEqual(), original, X, "mul is changed in place by")


def test_python_operators_ending_in_an_underscore_are_pure() -> None:
    graph_module = by_fx(lambda m, x: (x | (x < 1)).float() - (x | (x < 1)).exp())
    _, report = run(ShareEqual(), copy_sharing_modules(graph_module))
    assert (len(report.changes), report.near_misses) == (2, ())
    check_laws(ShareEqual(), graph_module, X > 0, exact=True)


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_statistic_updated_in_between_is_read_twice(trace: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = x + m.norm.running_mean
        return first.exp() * m.norm(x) - (x + m.norm.running_mean)

    model = randomise(Program(body, norm=nn.BatchNorm1d(4))).train()
    original = graph_of(model) if trace == "fx" else symbolic_trace(model, example_inputs={"x": X})
    changed, report = run(ShareEqual(), copy_sharing_modules(original))
    assert not report.changes
    assert report.near_misses
    check_laws(ShareEqual(), original, X, exact=True)


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_weights_that_a_layer_changes_stay_apart(trace: str) -> None:
    def rescaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.e(x) @ m.e.weight.t() + (x[:, None] * m.p.sum()).float()

    def learned(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.one(x) * m.two(x * 2) + m.one.running_mean - m.two.running_mean + x * m.zeros.b

    e, zeros = nn.Embedding(3, 4, max_norm=0.1), nn.Module()
    zeros.register_buffer("b", torch.zeros(4))
    table = Program(rescaled, e=e, p=nn.Parameter(e.weight.detach().clone())).eval()
    norms = Program(learned, one=nn.BatchNorm1d(4), two=nn.BatchNorm1d(4, affine=False), zeros=zeros).train()
    for model, x in ((table, torch.tensor([0, 1, 2])), (norms, X)):
        original = graph_of(model) if trace == "fx" else symbolic_trace(model, example_inputs={"x": x})
        check_refused(ShareEqual(weights=True), original, x)


def test_weight_with_a_hook_stays() -> None:
    graph_module = _equal_layers(lambda m, x: m.two(m.one(x).tanh()))
    for tensor in graph_module.get_submodule("two").parameters():
        tensor.register_hook(lambda gradient: gradient * 2)
    check_refused(ShareEqual(weights=True), graph_module, None)


def test_weight_shared_with_a_layer_stays() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4))
    one, two = nn.Parameter(torch.ones(4, 4)), layer.weight
    program = Program(lambda m, x: x @ m.one + x.sin() @ m.two + m.layer(x * 2), one=one, two=two, layer=layer)
    check_refused(
        ShareEqual(weights=True), graph_of(program), X, "two and one are equal, but share memory with outputs"
    )
