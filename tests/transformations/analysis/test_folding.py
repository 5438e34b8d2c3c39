"""Layers and weights that all rules skip that replace weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from optexport import symbolic_trace
from optexport.testing import check_applied, check_refused, copy_sharing_modules
from optexport.transformations import (
    CastPrecision,
    FoldNormAffine,
    FoldScale,
    FuseBatchNorm,
    FuseBias,
    FuseBiasInLinear,
    MergeLinearChain,
    MergeLinears,
    MergeParallelConvs,
    RemoveNoOps,
    Rule,
)
from optexport.transformations.rule import run
from tests._helpers.graphs import Program, graph_of

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-2, 2, 96).reshape(2, 4, 3, 4)


def _linear() -> Any:
    return nn.Linear(4, 4)


def _conv() -> Any:
    return nn.Conv2d(4, 4, 1)


def _norm_2d() -> Any:
    return nn.BatchNorm2d(4)


# For each rule: a program that it matches, except for the layer.
_PLACES: dict[Rule, tuple[Callable[[], Any], torch.Tensor, Callable[[Any, Any], Any], dict[str, Any]]] = {
    FuseBias(): (_linear, X, lambda m, x: m.layer(x) + 100.0, {}),
    FuseBatchNorm(): (_conv, IMAGE, lambda m, x: m.norm(m.layer(x)), {"norm": nn.BatchNorm2d(4)}),
    FoldScale(): (_linear, X, lambda m, x: m.layer(x) * 3, {}),
    FoldNormAffine(): (_linear, X, lambda m, x: m.layer(m.norm(x)), {"norm": nn.LayerNorm(4)}),
    MergeLinearChain(): (_linear, X, lambda m, x: m.layer(m.other(x)), {"other": nn.Linear(4, 4)}),
    MergeParallelConvs(): (_conv, IMAGE, lambda m, x: m.layer(x) + m.other(x), {"other": nn.Conv2d(4, 4, 1)}),
    MergeLinears(): (_linear, X, lambda m, x: m.layer(x) + m.other(x), {"other": nn.Linear(4, 4)}),
    FuseBiasInLinear(): (_linear, X, lambda m, x: m.layer(x), {}),
}
_FOLDING = [rule for rule in _PLACES if not isinstance(rule, (MergeLinears, FuseBiasInLinear))]


def _graph(rule: Rule, change: Callable[[Any], Any]) -> tuple[GraphModule, torch.Tensor]:
    make, x, body, parts = _PLACES[rule]
    layer = make()
    change(layer)
    return graph_of(Program(body, layer=layer, **parts).eval()), x


def _name(rule: Rule) -> str:
    return type(rule).__name__


def _instead(layer: nn.Module, name: str, tensor: Any, *, buffer: bool) -> None:
    del layer._parameters[name]
    if buffer:
        layer.register_buffer(name, tensor)
    else:
        setattr(layer, name, tensor)


@pytest.mark.parametrize("rule", _PLACES, ids=_name)
def test_rule_applies_in_each_program(rule: Rule) -> None:
    graph_module, _ = _graph(rule, lambda layer: None)
    assert len(run(rule, copy_sharing_modules(graph_module))[1].changes) == 1


@pytest.mark.sample(6)
@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("rule", _PLACES, ids=_name)
def test_weight_or_bias_that_is_not_a_parameter_is_skipped(rule: Rule, name: str, buffer: bool) -> None:
    graph_module, x = _graph(rule, lambda own: _instead(own, name, getattr(own, name).detach(), buffer=buffer))
    check_refused(rule, graph_module, x, "the weight or bias is not a parameter")


def _pruned(layer: Any) -> None:
    layer.weight, layer.bias = (nn.Parameter(own.detach()[:1]) for own in (layer.weight, layer.bias))


@pytest.mark.sample(5)
@pytest.mark.parametrize("rule", [rule for rule in _PLACES if rule != MergeLinearChain()], ids=_name)
def test_a_pruned_layer_with_its_old_sizes_is_skipped(rule: Rule) -> None:
    graph_module, x = _graph(rule, _pruned)
    runs = not isinstance(rule, FuseBatchNorm)
    check_refused(
        rule, graph_module, x if runs else None, "the shape of the weight does not fit the sizes of the module"
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("rule", _PLACES, ids=_name)
def test_a_bias_of_one_number_for_all_features_is_skipped(rule: Rule) -> None:
    graph_module, x = _graph(rule, lambda own: setattr(own, "bias", nn.Parameter(own.bias.detach()[:1])))
    runs = not isinstance(_PLACES[rule][0](), nn.Conv2d)
    check_refused(rule, graph_module, x if runs else None, "the shape of the bias does not fit the sizes of the module")


@pytest.mark.sample(4)
@pytest.mark.parametrize("rule", _FOLDING, ids=_name)
def test_weights_without_numbers_are_skipped(rule: Rule) -> None:
    _, _, body, parts = _PLACES[rule]
    program = Program(body, layer=_PLACES[rule][0](), **parts).eval()
    text = str(graph_of(program).graph)
    with torch.device("meta"):
        meta = Program(body, layer=_PLACES[rule][0](), **{name: _copy(part) for name, part in parts.items()})
    changed, report = run(rule, graph_of(meta.eval()))
    assert str(changed.graph) == text
    assert "the weights are on the meta device" in report.near_misses[0].reason


def _copy(module: Any) -> nn.Module:
    copied: nn.Module = type(module)(*{"Conv2d": (4, 4, 1), "Linear": (4, 4)}.get(type(module).__name__, (4,)))
    return copied


def _whole(layer: Any) -> None:
    for name in ("weight", "bias"):
        integers = torch.ones(getattr(layer, name).shape, dtype=torch.int64)
        setattr(layer, name, nn.Parameter(integers, requires_grad=False))


@pytest.mark.parametrize("rule", [FuseBias(), FoldScale()], ids=_name)
def test_integer_weights_are_skipped(rule: Rule) -> None:
    check_refused(rule, _graph(rule, _whole)[0], X.long(), "the weights are not real floating-point numbers")


def test_complex_weights_are_skipped() -> None:
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    for rule in (FuseBias(), FoldScale()):
        graph_module = graph_of(Program(_PLACES[rule][2], layer=layer).eval())
        check_refused(rule, graph_module, X.to(torch.complex64), "the weights are not real floating-point numbers")


def _holding_more(module: Any) -> None:
    module.register_buffer("more", torch.ones(3))


def _holding_more_that_is_not_saved(module: Any) -> None:
    module.register_buffer("more", torch.ones(3), persistent=False)


def _learning_more(module: Any) -> None:
    module.register_parameter("more", nn.Parameter(torch.ones(3)))


def _saving_more(module: Any) -> None:
    module._register_state_dict_hook(lambda module, state, prefix, meta: state.update({prefix + "more": torch.ones(3)}))


def _saving_more_before(module: Any) -> None:
    module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: None)


class _Tagged(nn.Parameter):
    """A subclass of Parameter, as quantizers create them."""


def _tagged(module: Any) -> None:
    module.weight = _Tagged(module.weight.detach())


_MORE = {
    _holding_more: "the tensor more does not belong to",
    _holding_more_that_is_not_saved: "the tensor more does not belong to",
    _learning_more: "the tensor more does not belong to",
    _saving_more: "the module has hooks on its state_dict",
    _saving_more_before: "the module has hooks on its state_dict",
    _tagged: "the weight is a _Tagged, a subclass of Parameter",
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("more", _MORE, ids=lambda more: more.__name__)
@pytest.mark.parametrize("rule", _PLACES, ids=_name)
def test_a_layer_with_additional_tensors_is_skipped(rule: Rule, more: Callable[[Any], None]) -> None:
    graph_module, x = _graph(rule, more)
    check_refused(rule, graph_module, x, _MORE[more])


@pytest.mark.sample(10)
@pytest.mark.parametrize("more", _MORE, ids=lambda more: more.__name__)
@pytest.mark.parametrize("rule", [rule for rule in _PLACES if _PLACES[rule][3]], ids=_name)
def test_a_second_layer_with_additional_tensors_is_skipped(rule: Rule, more: Callable[[Any], None]) -> None:
    make, x, body, parts = _PLACES[rule]
    ((name, part),) = parts.items()
    part = _copy(part)
    more(part)
    check_refused(rule, graph_of(Program(body, layer=make(), **{name: part}).eval()), x, _MORE[more])


def test_a_dropout_with_additional_tensors_is_skipped() -> None:
    dropout = nn.Dropout()
    _holding_more(dropout)
    graph_module = graph_of(Program(lambda m, x: m.drop(x) + 1, drop=dropout).eval())
    check_refused(RemoveNoOps(), graph_module, X, "drop: the tensor more does not belong to Dropout")


def test_layer_norm_keeps_everything_except_gain_and_shift() -> None:
    graph_module, _ = _graph(FoldNormAffine(), lambda layer: None)
    graph_module.norm.tag = "mine"
    bare = FoldNormAffine()(graph_module).norm
    assert (bare.tag, bare.weight, bare.bias, bare.elementwise_affine) == ("mine", None, None, False)


# Programs where a rule folds a trainable constant into a layer.
_TRAINED: dict[str, tuple[Rule, torch.Tensor, Callable[[], Any], Callable[[Any, Any], Any], Callable[[], Any]]] = {
    "bias": (FuseBias(), X, _linear, lambda m, x: m.layer(x) + m.other, lambda: nn.Parameter(torch.ones(4))),
    "factor after": (FoldScale(), X, _linear, lambda m, x: m.layer(x) * m.other, lambda: nn.Parameter(torch.ones(1))),
    "factor before": (FoldScale(), X, _linear, lambda m, x: m.layer(x * m.other), lambda: nn.Parameter(torch.ones(1))),
    "gain": (FoldNormAffine(), X, _linear, lambda m, x: m.layer(x * m.other), lambda: nn.Parameter(torch.ones(4))),
    "layer norm": (FoldNormAffine(), X, _linear, lambda m, x: m.layer(m.other(x)), lambda: nn.LayerNorm(4)),
    "norm after": (FuseBatchNorm(), IMAGE, _conv, lambda m, x: m.other(m.layer(x)), _norm_2d),
    "norm before": (FuseBatchNorm(), IMAGE, _conv, lambda m, x: m.layer(m.other(x)), _norm_2d),
    "norm beside": (MergeParallelConvs(), IMAGE, _conv, lambda m, x: m.layer(x) + m.other(x), _norm_2d),
}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["layer", "other"])
@pytest.mark.parametrize("case", _TRAINED)
def test_trained_and_frozen_tensors_are_not_combined(case: str, frozen: str) -> None:
    rule, x, make, body, make_other = _TRAINED[case]
    program = Program(body, layer=make(), other=make_other()).eval()
    applied = symbolic_trace(program, example_inputs={"x": x})
    assert len(run(rule, copy_sharing_modules(applied))[1].changes) == 1
    getattr(program, frozen).requires_grad_(False)
    graph_module = symbolic_trace(program, example_inputs={"x": x})
    check_refused(rule, graph_module, x, "differ in requires_grad")


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["bias", "factor after", "gain"])
def test_a_buffer_is_folded_into_trained_and_frozen_layers(case: str) -> None:
    for frozen in (False, True):
        rule, x, make, body, make_other = _TRAINED[case]
        program = Program(body, layer=make().requires_grad_(not frozen)).eval()
        program.register_buffer("other", make_other().detach() * 3)
        check_applied(rule, symbolic_trace(program, example_inputs={"x": x}), x)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [case for case in _TRAINED if case != "norm beside"])
def test_a_weight_keeps_its_strides(case: str) -> None:
    rule, x, make, body, make_other = _TRAINED[case]
    for order in [(0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0)] if make is _conv else [(1, 0)]:
        layer = nn.Conv2d(4, 4, (2, 3)) if make is _conv else nn.Linear(4, 4)
        weight = layer.weight.detach().permute(order).contiguous()
        layer.weight = nn.Parameter(weight.permute([order.index(axis) for axis in range(len(order))]))
        graph_module = symbolic_trace(Program(body, layer=layer, other=make_other()).eval(), example_inputs={"x": x})
        report = check_applied(rule, graph_module, x)
        assert report.changes
        assert rule(copy_sharing_modules(graph_module)).layer.weight.stride() == layer.weight.stride()


def test_weight_keeps_its_stride_along_an_axis_of_one_element() -> None:
    layer = nn.Linear(1, 4)
    layer.weight = nn.Parameter(torch.randn(4).as_strided((4, 1), (1, 7)))
    graph_module = graph_of(Program(lambda m, x: m.layer(x) * 3, layer=layer).eval())
    check_applied(FoldScale(), graph_module, X[:, :1])
    assert FoldScale()(graph_module).layer.weight.stride() == (1, 7)


@pytest.mark.parametrize("rule", [FuseBias(), FoldScale(), FoldNormAffine()], ids=_name)
@pytest.mark.parametrize("weight", [torch.randn(4, 8)[:, :4], torch.randn(1, 4).expand(4, 4)], ids=["gaps", "expanded"])
def test_weight_with_strides_that_cannot_be_kept_is_skipped(rule: Rule, weight: torch.Tensor) -> None:
    graph_module, x = _graph(rule, lambda layer: setattr(layer, "weight", nn.Parameter(weight)))
    check_refused(rule, graph_module, x, "the strides of the weight have gaps or overlap")


def test_a_weight_with_gaps_in_memory_is_not_cast() -> None:
    program = Program(lambda m, x: m.layer(x), layer=_linear()).eval()
    program.layer.weight = nn.Parameter(torch.randn(4, 8)[:, :4])
    graph_module = symbolic_trace(program, example_inputs={"x": X})
    check_refused(CastPrecision(), graph_module, X, "layer: the strides of the weight have gaps or overlap")


# Weights whose sums of products, or products, overflow.
_GREAT: dict[str, tuple[Rule, torch.dtype, Callable[[Any], None]]] = {
    "bias": (FuseBias(), torch.float16, lambda m: m.layer.bias.fill_(65504)),
    "norm of half precision": (FuseBatchNorm(), torch.float16, lambda m: _norm(m, 300, 1e-7, 100)),
    "norm of single precision": (FuseBatchNorm(), torch.float32, lambda m: _norm(m, 1, 1e-5, 1e38)),
    "scale": (FoldScale(), torch.float16, lambda m: m.layer.weight.fill_(3e4)),
    "gain": (FoldNormAffine(), torch.bfloat16, lambda m: (m.layer.weight.fill_(1e30), m.norm.weight.fill_(1e30))),
    "chain": (MergeLinearChain(), torch.float32, lambda m: (m.layer.weight.fill_(1e25), m.other.weight.fill_(1e25))),
    "kernels": (MergeParallelConvs(), torch.float16, lambda m: [k.weight.fill_(4e4) for k in (m.layer, m.other)]),
    "infinite already": (FoldScale(), torch.float32, lambda m: m.layer.weight[0].fill_(torch.inf)),
}
# Weights whose products become subnormal.
_SMALL: dict[str, tuple[Rule, torch.dtype, Callable[[Any], None]]] = {
    "norm": (FuseBatchNorm(), torch.float16, lambda m: m.norm.weight.fill_(1e-5)),
    "norm of one feature": (FuseBatchNorm(), torch.float16, lambda m: m.norm.weight[2].fill_(1e-5)),
    "gain": (FoldNormAffine(), torch.float16, lambda m: m.norm.weight.fill_(1e-5)),
    "gain of one feature": (FoldNormAffine(), torch.float16, lambda m: m.norm.weight[2].fill_(1e-5)),
    "chain": (MergeLinearChain(), torch.float32, lambda m: (m.layer.weight.fill_(1e-20), m.other.weight.fill_(1e-20))),
}


def _norm(m: Any, mean: float, variance: float, weight: float) -> None:
    m.norm.running_mean.fill_(mean)
    m.norm.running_var.fill_(variance)
    m.layer.weight.fill_(weight)


def _extreme(rule: Rule, dtype: torch.dtype, change: Callable[[Any], None]) -> GraphModule:
    make, _, body, parts = _PLACES[rule]
    copies = {name: _copy(part) for name, part in parts.items()}
    program = Program(body, layer=make(), **copies).to(dtype).eval()
    with torch.no_grad():
        change(program)
    return graph_of(program)


@pytest.mark.parametrize("case", _GREAT)
def test_weights_that_would_overflow_are_skipped(case: str) -> None:
    check_refused(_GREAT[case][0], _extreme(*_GREAT[case]), None, "the weights would overflow or become subnormal")


@pytest.mark.parametrize("case", _SMALL)
def test_weights_that_would_become_subnormal_are_skipped(case: str) -> None:
    check_refused(_SMALL[case][0], _extreme(*_SMALL[case]), None, "the weights would overflow or become subnormal")


@pytest.mark.parametrize("rule", _FOLDING, ids=_name)
def test_a_few_small_weights_among_larger_ones_do_not_matter(rule: Rule) -> None:
    graph_module = _extreme(rule, torch.float16, lambda m: m.layer.weight[0, 0].fill_(3e-5))
    assert len(run(rule, graph_module)[1].changes) == 1
