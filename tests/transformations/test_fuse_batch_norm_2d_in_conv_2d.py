"""FuseBatchNorm2dInConv2d: matches, and every reason to skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.utils import parametrizations, prune

from optexport.testing import check_applied, check_laws, check_refused
from optexport.transformations import FuseBatchNorm2dInConv2d
from tests._helpers import models
from tests._helpers.graphs import Program, by_export, by_fx, calls, graph_of
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 2 * 4 * 6 * 5).reshape(2, 4, 6, 5)
RULE = FuseBatchNorm2dInConv2d()


def _folded(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(m.conv(x))


def _pair(**options: Any) -> Program:
    return randomise(Program(_folded, conv=nn.Conv2d(4, 6, 3, **options), norm=nn.BatchNorm2d(6)))  # type: ignore[return-value]


def test_golden_graph_before_and_after() -> None:
    graph_module = by_fx(lambda m, x: m.norm(m.conv(x)).relu(), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    before = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %conv : [num_users=1] = call_module[target=conv](args = (%x,), kwargs = {})
    %norm : [num_users=1] = call_module[target=norm](args = (%conv,), kwargs = {})
    %relu : [num_users=1] = call_method[target=relu](args = (%norm,), kwargs = {})
    return relu"""
    after = """graph():
    %x : [num_users=1] = placeholder[target=x]
    %conv : [num_users=1] = call_module[target=conv](args = (%x,), kwargs = {})
    %relu : [num_users=1] = call_method[target=relu](args = (%conv,), kwargs = {})
    return relu"""
    assert str(graph_module.graph) == before
    RULE(graph_module)
    assert str(graph_module.graph) == after
    assert list(graph_module.state_dict()) == ["conv.weight", "conv.bias"]


def test_no_batch_norm_is_left_in_a_resnet() -> None:
    graph_module = models.traced("resnet")
    check_applied(RULE, graph_module, models.inputs("resnet"), count=8)
    assert not calls(check_laws(RULE, graph_module, models.inputs("resnet")), nn.BatchNorm2d)


_OPTIONS: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": (1, 2)},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "circular": {"padding": 2, "padding_mode": "circular"},
}


@pytest.mark.slow
@pytest.mark.parametrize("option", _OPTIONS)
def test_every_kind_of_convolution_keeps_its_options(option: str) -> None:
    program = _pair(**_OPTIONS[option])
    check_applied(RULE, graph_of(program), X)
    check_applied(RULE, by_export(X, _folded, conv=program.conv, norm=program.norm), X)


def test_a_norm_without_gain_and_shift_is_folded() -> None:
    check_applied(RULE, by_fx(_folded, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6, affine=False)), X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_floating_dtype(dtype: torch.dtype) -> None:
    check_applied(RULE, graph_of(_pair()).to(dtype), X.to(dtype), scale=10)


def test_a_tiny_variance_is_folded_without_loss() -> None:
    program = _pair()
    program.norm.running_var.fill_(1e-12)
    check_applied(RULE, graph_of(program), X)


def test_keyword_calls_are_folded() -> None:
    graph_module = by_fx(lambda m, x: m.norm(input=m.conv(input=x)), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    check_applied(RULE, graph_module, X)


def test_weights_keep_their_memory_format() -> None:
    check_applied(RULE, graph_of(_pair().to(memory_format=torch.channels_last)), X)


@pytest.mark.parametrize("frozen", ["conv", "norm", "both"])
def test_trained_parameters_stay_trained(frozen: str) -> None:
    program = _pair()
    for name in ("conv", "norm"):
        if frozen in (name, "both"):
            getattr(program, name).requires_grad_(False)
    check_laws(RULE, graph_of(program), X)


def test_frozen_weight_with_a_trained_bias_keeps_both_flags() -> None:
    program = _pair()
    program.conv.weight.requires_grad_(False)
    check_laws(RULE, graph_of(program), X)


def test_chains_below_containers_are_folded() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3)), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.BatchNorm2d(2)
    )
    check_applied(RULE, graph_of(randomise(model)), X, count=2)


def test_two_consecutive_norms_are_folded() -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    graph_module = graph_of(randomise(model))
    assert not calls(check_laws(RULE, graph_module, X), nn.BatchNorm2d)


def test_other_pairs_are_ignored() -> None:
    conv, norm = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
    relu = by_fx(lambda m, x: m.norm(m.conv(x).relu()), conv=conv, norm=norm)
    check_refused(RULE, relu, X, "relu lies between conv and norm")
    check_refused(RULE, by_fx(lambda m, x: m.conv(m.norm(x)), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(4)), X)
    check_refused(RULE, by_fx(_folded, conv=nn.ConvTranspose2d(4, 6, 3), norm=nn.BatchNorm2d(6)), X)
    check_refused(RULE, by_fx(lambda m, x: m.norm(x), norm=nn.BatchNorm2d(4)), X)


def test_a_convolution_with_other_users_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.norm(y) + y

    graph_module = by_fx(body, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    check_refused(RULE, graph_module, X, "the result of conv has other users")


def test_a_convolution_that_feeds_two_norms_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.norm(y) - m.other(y)

    graph_module = by_fx(body, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6), other=nn.BatchNorm2d(6))
    check_refused(RULE, graph_module, X, *["the result of conv has other users"] * 2)


def test_a_norm_in_train_mode_is_skipped() -> None:
    program = _pair()
    program.norm.train()
    check_refused(RULE, graph_of(program), X, "norm: the norm is in train mode")


def test_a_norm_without_running_statistics_is_skipped() -> None:
    graph_module = by_fx(_folded, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6, track_running_stats=False))
    check_refused(RULE, graph_module, X, "norm: the norm has no running statistics")


@pytest.mark.parametrize("name", ["conv", "norm"])
def test_a_layer_that_is_called_twice_is_skipped(name: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.norm(m.conv(x))
        return y + (m.conv(x.neg()) if name == "conv" else m.norm(y))

    graph_module = by_fx(body, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    check_refused(RULE, graph_module, X, f"{name}: the module is called more than once")


@pytest.mark.parametrize("name", ["conv", "norm"])
def test_a_layer_under_two_names_is_skipped(name: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.norm(m.conv(x))
        return y + (m.conv(x.neg()) if name == "conv" else m.norm(y))

    program = randomise(Program(body, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6)))
    graph = graph_of(program).graph
    graph.find_nodes(op="call_module", target=name)[1].target = "alias"
    program.alias = getattr(program, name)
    check_refused(RULE, GraphModule(program, graph), X, f"{name}: the same module has the names alias and {name}")


@pytest.mark.parametrize("name", ["conv", "norm"])
def test_a_layer_with_hooks_is_skipped(name: str) -> None:
    program = _pair()
    getattr(program, name).register_forward_hook(lambda module, args, result: result * 2)
    check_refused(RULE, graph_of(program), X, f"{name}: the module has hooks")


@pytest.mark.parametrize("name", ["conv", "norm"])
def test_layer_with_a_replaced_forward_is_skipped(name: str) -> None:
    program = _pair()
    layer = getattr(program, name)
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2
    check_refused(RULE, graph_of(program), None, f"{name}: ")


@pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_convolution_is_skipped(how: Callable[[nn.Module], nn.Module]) -> None:
    graph_module = by_fx(_folded, conv=how(nn.Conv2d(4, 6, 3)), norm=nn.BatchNorm2d(6))
    check_refused(RULE, graph_module, X, "conv: ParametrizedConv2d is a subclass of Conv2d")


def test_a_pruned_convolution_is_skipped() -> None:
    program = _pair()
    with torch.no_grad():
        prune.random_unstructured(program.conv, "weight", amount=0.5)
    check_refused(RULE, graph_of(program), X, "conv: the module has hooks")


class _Doubling(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class _Activated(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_subclasses_are_skipped() -> None:
    graph_module = by_fx(_folded, conv=_Doubling(4, 6, 3), norm=nn.BatchNorm2d(6))
    check_refused(RULE, graph_module, X, "conv: _Doubling is a subclass of Conv2d")
    graph_module = by_fx(_folded, conv=nn.Conv2d(4, 6, 3), norm=_Activated(6))
    check_refused(RULE, graph_module, X, "norm: _Activated is a subclass of BatchNorm2d")


@pytest.mark.parametrize("layer", ["conv", "norm"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tied_parameter_is_skipped(layer: str, name: str) -> None:
    layers = {"conv": nn.Conv2d(4, 6, 3), "norm": nn.BatchNorm2d(6), "other": nn.Conv2d(4, 6, 3)}
    layers["other"].register_parameter("tied", getattr(layers[layer], name))
    graph_module = by_fx(lambda m, x: _folded(m, x) + m.other(x), **layers)
    check_refused(RULE, graph_module, X, f"{layer}: the {name} is tied to other.tied")


def test_statistics_shared_with_another_norm_stay() -> None:
    layers = {"conv": nn.Conv2d(4, 6, 3), "norm": nn.BatchNorm2d(6), "other": nn.BatchNorm2d(6)}
    layers["other"].running_mean = layers["norm"].running_mean
    check_applied(RULE, by_fx(lambda m, x: m.other(_folded(m, x).relu()), **layers), X)


def test_mixed_dtypes_are_skipped() -> None:
    program = _pair()
    program.conv.bfloat16()
    check_refused(RULE, graph_of(program), X.bfloat16(), "norm and conv differ in dtype or device")


def test_weight_read_elsewhere_is_skipped() -> None:
    graph_module = by_fx(
        lambda m, x: _folded(m, x) + m.conv.weight.sum(), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6)
    )
    check_refused(RULE, graph_module, X, "conv: the graph also reads the weight directly")


def test_a_statistic_that_the_graph_reads_stays() -> None:
    graph_module = by_export(
        X, lambda m, x: _folded(m, x) + m.norm.running_mean.sum(), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6)
    )
    assert graph_module.graph.find_nodes(op="get_attr", target="norm.running_mean")
    check_laws(RULE, graph_module, X)


def test_an_in_place_change_between_convolution_and_norm() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        y.relu_()
        return m.norm(y)

    check_laws(RULE, by_fx(body, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6)), X)
