"""MergeLinearChain merges consecutive linears and low-rank adapters if that is less work."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from optexport import symbolic_trace
from optexport.testing import check_applied, check_laws, check_refused, copy_sharing_modules
from optexport.transformations import MergeLinearChain, MergeLinears, compose
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Inherited, by_export, by_fx, calls
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


def _chain(m: Any, x: torch.Tensor) -> Any:
    return m.two(m.one(x))


def _adapted(m: Any, x: torch.Tensor) -> Any:
    return m.base(x) + m.b(m.a(x)) * 2.0


def _layers(rank: int = 1, **options: Any) -> dict[str, nn.Module]:
    return {
        "base": nn.Linear(4, 5),
        "a": nn.Linear(4, rank, bias=False),
        "b": nn.Linear(rank, 5, bias=False, **options),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_linear_of_a_linear(first: bool, second: bool) -> None:
    layers = {"one": nn.Linear(4, 6, bias=first), "two": nn.Linear(6, 3, bias=second)}
    graph_module = by_export(X, _chain, **layers)
    check_applied(MergeLinearChain(), graph_module, X)
    changed, _ = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert list(changed.state_dict()) == (["two.weight", "two.bias"] if first or second else ["two.weight"])
    (call,) = calls(changed, nn.Linear)
    assert (
        str(changed.get_submodule(str(call.target))) == f"Linear(in_features=4, out_features=3, bias={first or second})"
    )


def test_three_in_a_row() -> None:
    graph_module = by_export(
        X, lambda m, x: m.three(m.two(m.one(x))), one=nn.Linear(4, 6), two=nn.Linear(6, 6), three=nn.Linear(6, 2)
    )
    check_applied(MergeLinearChain(), graph_module, X, count=2)


def test_bottleneck_is_not_merged_because_it_would_cost_more() -> None:
    graph_module = by_export(X, _chain, one=nn.Linear(4, 1), two=nn.Linear(1, 4))
    check_refused(MergeLinearChain(), graph_module, X, "one and two: one linear would need more multiplications")
    same = by_export(X, _chain, one=nn.Linear(4, 2), two=nn.Linear(2, 4))
    check_refused(MergeLinearChain(), same, X, "one linear would need more multiplications")


def test_dropout_and_identity_between() -> None:
    graph_module = by_fx(
        lambda m, x: m.two(m.same(m.drop(m.one(x)))),
        one=nn.Linear(4, 4),
        two=nn.Linear(4, 4),
        drop=nn.Dropout(),
        same=nn.Identity(),
    )
    check_applied(MergeLinearChain(), graph_module, X)
    training = copy.deepcopy(graph_module)
    training.get_submodule("drop").train()
    check_refused(MergeLinearChain(), training, X)
    hooked = copy.deepcopy(graph_module)
    hooked.get_submodule("drop").register_forward_hook(lambda module, args, result: result * 2)
    check_refused(MergeLinearChain(), hooked, X)
    raised = by_export(
        X,
        lambda m, x: m.two(F.dropout(m.one(F.dropout(x, training=False)), training=False)),
        one=nn.Linear(4, 4),
        two=nn.Linear(4, 4),
    )
    check_applied(MergeLinearChain(), raised, X)


def test_other_operations_between_prevent_a_merge() -> None:
    for between in (torch.tanh, lambda y: y + 1, lambda y: y.transpose(0, 1), lambda y: y * 2):
        graph_module = by_export(
            X, lambda m, x, f=between: m.two(f(m.one(x))), one=nn.Linear(4, 4), two=nn.Linear(4, 4)
        )
        check_refused(MergeLinearChain(), graph_module, X)


def test_a_middle_that_is_used_elsewhere_stays() -> None:
    graph_module = by_export(X, lambda m, x: m.two(y := m.one(x)) * y, one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    check_refused(MergeLinearChain(), graph_module, X, "the result of linear has other users")
    returned = by_export(X, lambda m, x: (m.two(y := m.one(x)), y), one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    check_refused(MergeLinearChain(), returned, X, "the result of linear has other users")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "body",
    [
        _adapted,
        lambda m, x: m.b(m.a(x)) * 2.0 + m.base(x),
        lambda m, x: m.base(x) + 2 * m.b(m.a(x)),
        lambda m, x: m.base(x) + m.b(m.a(x)) / 3,
        lambda m, x: m.base(x) + m.b(m.a(x)) * 0.5 * -3,
        lambda m, x: m.base(x) + m.b(m.a(x)),
        lambda m, x: m.base(x) + m.b(m.a(F.dropout(x, training=False))) * 2.0,
        lambda m, x: m.base(y := F.dropout(x, training=False)) + m.b(F.dropout(m.a(y), training=False)) * 2.0,
    ],
)
@pytest.mark.parametrize("rank", [1, 7])
def test_a_low_rank_adapter(body: Any, rank: int) -> None:
    graph_module = by_export(X, body, **_layers(rank))
    check_laws(MergeLinearChain(), graph_module, X)
    changed, _ = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert list(changed.state_dict()) == ["base.weight", "base.bias"]
    assert [node.target for node in changed.graph.nodes if node.op == "call_module"] == ["base"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("biases", range(8))
def test_biases_anywhere(biases: int) -> None:
    base, a, b = (bool(biases & bit) for bit in (1, 2, 4))
    layers = {"base": nn.Linear(4, 5, bias=base), "a": nn.Linear(4, 1, bias=a), "b": nn.Linear(1, 5, bias=b)}
    check_applied(MergeLinearChain(), by_export(X, _adapted, **layers), X)


def test_two_adapters_and_a_linear_of_the_same_input() -> None:
    graph_module = by_export(
        X,
        lambda m, x: m.base(x) + m.b(m.a(x)) * 2.0 + m.d(m.c(x)) * 3.0 + m.e(x),
        **_layers(),
        c=nn.Linear(4, 1),
        d=nn.Linear(1, 5),
        e=nn.Linear(4, 5),
    )
    check_applied(MergeLinearChain(), graph_module, X, count=3)


def test_chain_interrupted_by_an_adapter() -> None:
    graph_module = by_export(
        X, lambda m, x: m.base(y := m.one(x)) + m.b(m.a(y)) * 2.0, one=nn.Linear(4, 4), **_layers()
    )
    check_applied(MergeLinearChain(), graph_module, X, count=2)


def test_a_frozen_linear_stays_frozen() -> None:
    layers = _layers()
    graph_module = by_export(X, _adapted, **layers)
    graph_module.get_submodule("base").requires_grad_(False)
    check_applied(MergeLinearChain(), graph_module, X)
    changed, _ = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert not any(parameter.requires_grad for parameter in changed.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.base(x) + m.b(m.a(x.tanh())),
        lambda m, x: m.base(x) + m.b(m.a(x).tanh()),
        lambda m, x: m.base(x) + m.b(m.a(x)) * x.sum(),
        lambda m, x: m.base(x) - m.b(m.a(x)),
        lambda m, x: m.base(x) + m.b(m.a(x)) * 0,
        lambda m, x: m.base(x) + m.b(m.a(x)) * float("inf"),
        lambda m, x: m.base(x) + m.b(m.a(x))[:, :1],
        lambda m, x: m.base(x) * m.b(m.a(x)),
    ],
)
def test_result_that_is_not_an_adapter_stays(body: Any) -> None:
    graph_module = by_export(X, body, **_layers())
    _, report = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert not report.changes
    check_laws(MergeLinearChain(), graph_module, X, exact=True)


@pytest.mark.slow
def test_result_that_broadcasts_is_not_an_adapter() -> None:
    graph_module = by_export(
        X, _adapted, base=nn.Linear(4, 5), a=nn.Linear(4, 2, bias=False), b=nn.Linear(2, 1, bias=False)
    )
    _, report = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert [change.nodes for change in report.changes] == [("linear_2",)]  # only the chain
    check_laws(MergeLinearChain(), graph_module, X)


@pytest.mark.slow
def test_parts_that_are_used_elsewhere_stay() -> None:
    used = by_export(X, lambda m, x: (y := m.base(x)) + m.b(m.a(x)) * y, **_layers())
    _, report = run(MergeLinearChain(), copy_sharing_modules(used))
    assert not report.changes
    inner = by_export(X, lambda m, x: m.base(x) + m.b(y := m.a(x)) * 2.0 + y, **_layers())
    check_refused(MergeLinearChain(), inner, X, "base and b: the result of linear_1 has other users")
    same = by_export(X, lambda m, x: (y := m.base(x)) + y * 2.0, base=nn.Linear(4, 5))
    check_refused(MergeLinearChain(), same, X, "the result of linear has other users")


def test_input_changed_in_place_in_between() -> None:
    def chain(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y = m.one(x)
        x.add_(1.0)
        return m.two(y)

    def adapted(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        y = m.base(x)
        x.add_(1.0)
        return y + m.b(m.a(x))

    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    check_refused(MergeLinearChain(), by_fx(chain, **layers), X, "mul is changed in place by add_ between the linears")
    check_refused(
        MergeLinearChain(), by_fx(adapted, **_layers()), X, "mul is changed in place by add_ between the linears"
    )


def test_middle_result_changed_in_place() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.one(x)
        y.add_(1.0)
        return m.two(y)

    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    check_laws(MergeLinearChain(), by_export(X, body, **layers), X, exact=True)
    check_laws(MergeLinearChain(), by_fx(body, **layers), X, exact=True)


def _two(change: Any) -> Any:
    graph_module = by_fx(_chain, one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    change(graph_module.get_submodule("one"))
    return graph_module


def test_subclassed_or_hooked_linear_stays() -> None:
    rule = MergeLinearChain()
    check_refused(rule, by_fx(_chain, one=Inherited(4, 4), two=nn.Linear(4, 4)), X, "one: Inherited is a subclass")
    check_refused(
        rule, _two(lambda one: one.register_forward_hook(lambda *a: a[2] * 2)), X, "one: the module has hooks"
    )
    check_refused(rule, _two(lambda one: one.requires_grad_(False)), X, "the linears differ in requires_grad")
    check_refused(rule, _two(lambda one: one.train()), X, "the linears differ in dtype, device or mode")
    replaced = _two(lambda one: setattr(one, "forward", lambda x: F.linear(x, one.weight) + 1))
    check_refused(rule, replaced, None, "one: the forward method was replaced")
    normed = _two(lambda one: nn.utils.parametrizations.weight_norm(one))
    check_refused(rule, normed, None, "one: ParametrizedLinear is a subclass")
    strided = _two(lambda one: setattr(one, "weight", nn.Parameter(one.weight.detach().t().contiguous().t())))
    check_refused(rule, strided, X, "the weight of one is not contiguous")


def test_shared_and_tied_linears_stay() -> None:
    rule, one, two = MergeLinearChain(), nn.Linear(4, 4), nn.Linear(4, 4)
    check_refused(rule, by_fx(lambda m, x: m.one(m.one(x)), one=one), X, "one: the module is called more than once")
    names = by_fx(lambda m, x: m.two(m.one(x)) * m.three(x), one=one, two=two, three=nn.Linear(4, 4))
    names.add_module("three", names.get_submodule("one"))
    check_refused(rule, names, X, "one: the same module has the names one and three")
    tied = nn.Linear(4, 4)
    tied.weight = two.weight
    check_refused(rule, by_fx(_chain, one=tied, two=two), X, "one: the weight is tied to two.weight")
    read = by_fx(lambda m, x: m.two(m.one(x)) * m.one.weight.sum(), one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    check_refused(rule, read, X, "one: the graph also reads the weight directly")


@pytest.mark.slow
def test_keyword_calls_stay_keyword_calls() -> None:
    graph_module = by_fx(lambda m, x: m.two(input=m.one(input=x)), one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    check_applied(MergeLinearChain(), graph_module, X)
    changed, _ = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert "self.two(input = x)" in changed.code


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    chain = {"one": nn.Linear(4, 6).to(dtype), "two": nn.Linear(6, 3).to(dtype)}
    check_applied(MergeLinearChain(), by_export(x, _chain, **chain), x)
    layers = {name: layer.to(dtype) for name, layer in _layers().items()}
    check_applied(MergeLinearChain(), by_export(x, _adapted, **layers), x)


def test_a_product_that_overflows_half_precision_stays() -> None:
    graph_module = by_fx(_chain, one=nn.Linear(4, 4).half(), two=nn.Linear(4, 4).half())
    with torch.no_grad():
        for parameter in graph_module.parameters():
            parameter.fill_(300.0)
    check_refused(MergeLinearChain(), graph_module, None, "the weights would overflow")


def test_an_adapter_that_overflows_stays() -> None:
    graph_module = by_fx(_adapted, **_layers())
    with torch.no_grad():
        for name in ("a", "b"):
            graph_module.get_submodule(name).weight.fill_(1e25)  # type: ignore[operator, union-attr]
    check_refused(MergeLinearChain(), graph_module, None, "the weights would overflow")


def test_factor_beyond_the_range_of_floats_is_ignored() -> None:
    check_refused(MergeLinearChain(), by_fx(lambda m, x: m.base(x) + 10**400 * m.b(m.a(x)), **_layers()), None)


def test_an_adapter_in_another_precision_stays() -> None:
    layers = _layers()
    graph_module = by_export(X, _adapted, base=layers["base"], a=layers["a"], b=layers["b"])
    graph_module.get_submodule("base").double()
    check_refused(MergeLinearChain(), graph_module, None, "the linears differ in dtype, device or mode")


def test_no_rows() -> None:
    graph_module = by_fx(_chain, one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    check_applied(MergeLinearChain(), graph_module, torch.zeros(0, 4))


class _LowRank(nn.Module):
    """A linear with a low-rank adapter, as in peft."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        for name in ("default",):
            x = x.to(self.lora_A[name].weight.dtype)
            down = self.lora_A[name](self.lora_dropout[name](x))
            result = result + self.lora_B[name](down) * self.scaling[name]
        return result


_SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names", "places"),
    [
        (BertModel(BertConfig(**_SIZES)), ("query", "value"), 4),
        (LlamaForCausalLM(LlamaConfig(**_SIZES)), ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"), 10),
    ],
)
def test_a_model_with_adapters(model: PreTrainedModel, names: tuple[str, ...], places: int) -> None:
    model = copy.deepcopy(model)
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names:
            assert isinstance(module, nn.Linear)
            setattr(model.get_submodule(parent), name, _LowRank(module, 4, 8.0))
    graph_module = symbolic_trace(randomise(model))
    ids = torch.randint(0, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    check_applied(MergeLinearChain(), graph_module, inputs, count=places)
    changed, _ = run(MergeLinearChain(), copy_sharing_modules(graph_module))
    assert not [name for name in changed.state_dict() if "lora" in name]
    _, report = run(MergeLinears(), changed)
    assert report.changes
    check_laws(compose(MergeLinearChain(), MergeLinears()), graph_module, inputs)
    check_laws(compose(MergeLinears(), MergeLinearChain()), graph_module, inputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", models.NAMES)
def test_models_without_adapters_have_no_matches(name: str) -> None:
    _, report = run(MergeLinearChain(), copy_sharing_modules(models.traced(name)))
    assert not report.changes


def test_cancelling_views_with_other_users_are_skipped() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            t = self.up(x).transpose(1, 2)
            return self.down(t.transpose(1, 2)), t.mean(-1)

    x = torch.randn(2, 9, 8)
    model = Forked().eval()
    graph_module = MergeLinearChain()(symbolic_trace(model, example_inputs=(x,)))
    for output, expected in zip(graph_module(x), model(x), strict=True):
        torch.testing.assert_close(output, expected)
