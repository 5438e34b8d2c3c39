"""FuseBatchNorm: all layers, before and after, with no-ops between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from transformers import LevitConfig, LevitForImageClassification

from optexport import symbolic_trace
from optexport.signature.signature import Dim
from optexport.testing import assert_close, check_applied, check_refused, copy_sharing_modules, outputs
from optexport.transformations import FuseBatchNorm, ShareEqual
from optexport.transformations.rule import run
from tests._helpers.graphs import Program, by_export, by_fx, calls
from tests._helpers.models import randomise

SPACE = {1: (7,), 2: (6, 5), 3: (4, 5, 3)}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _x(dims: int, channels: int = 4) -> torch.Tensor:
    return torch.randn(3, channels, *SPACE[dims])


def _layer_then_norm(m: Any, x: torch.Tensor) -> Any:
    return m.norm(m.layer(x))


def _norm_then_layer(m: Any, x: torch.Tensor) -> Any:
    return m.layer(m.norm(x))


def test_reason_for_layers_on_both_ways_of_a_branch_names_the_rule_that_joins_them() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.norm(m.conv(x)) + m.norm(m.conv(x)) * 2

    graph_module = by_fx(body, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    _, report = run(FuseBatchNorm(), graph_module)
    reason = "norm: the module is called more than once, perhaps on equal inputs, which share-equal before this rule"
    assert [miss.reason for miss in report.near_misses] == [f"{reason} would join"] * 2
    run(ShareEqual(), graph_module)
    assert len(run(FuseBatchNorm(), graph_module)[1].changes) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kinds", [CONVOLUTIONS, TRANSPOSED], ids=["convolution", "transposed"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_after_a_convolution(dims: int, kinds: Any, groups: int, bias: bool) -> None:
    layer = kinds[dims](4, 6, 3, padding=1, groups=groups, bias=bias)
    graph_module = by_export(_x(dims), _layer_then_norm, layer=layer, norm=NORMS[dims](6))
    check_applied(FuseBatchNorm(), graph_module, _x(dims))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_before_a_convolution_without_padding(dims: int, groups: int) -> None:
    layer = CONVOLUTIONS[dims](4, 8, 2, groups=groups, stride=2)
    graph_module = by_export(_x(dims), _norm_then_layer, layer=layer, norm=NORMS[dims](4))
    check_applied(FuseBatchNorm(), graph_module, _x(dims))


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_before_a_convolution_that_pads_with_its_input(mode: str) -> None:
    layer = nn.Conv2d(4, 5, 3, padding=1, padding_mode=mode)
    graph_module = by_fx(lambda m, x: m.layer(m.norm(x)), layer=layer, norm=nn.BatchNorm2d(4))
    check_applied(FuseBatchNorm(), graph_module, _x(2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("padding", [1, (0, 1), "same"])
def test_norm_before_a_convolution_with_zero_padding_stays(padding: Any) -> None:
    layer = nn.Conv2d(4, 5, 3, padding=padding)
    graph_module = by_export(_x(2), _norm_then_layer, layer=layer, norm=nn.BatchNorm2d(4))
    check_refused(FuseBatchNorm(), graph_module, _x(2), "pads with zeros, to which the shift of norm does not apply")


def test_norm_before_a_transposed_convolution_stays() -> None:
    graph_module = by_export(_x(2), _norm_then_layer, layer=nn.ConvTranspose2d(4, 5, 3), norm=nn.BatchNorm2d(4))
    check_refused(FuseBatchNorm(), graph_module, _x(2), "does not apply")


@pytest.mark.sample(1)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_norm_without_a_shift_is_folded_into_any_convolution(kind: Any, padding: int) -> None:
    graph_module = by_export(
        _x(2), _norm_then_layer, layer=kind(4, 6, 3, padding=padding, groups=2), norm=nn.BatchNorm2d(4)
    )
    with torch.no_grad():
        graph_module.norm.running_mean.zero_()
        graph_module.norm.bias.zero_()
    check_applied(FuseBatchNorm(), graph_module, _x(2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [_layer_then_norm, _norm_then_layer])
def test_before_and_after_a_linear(body: Any) -> None:
    x = torch.randn(3, 4)
    check_applied(FuseBatchNorm(), by_export(x, body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)), x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [_layer_then_norm, _norm_then_layer])
def test_norm_of_sequences_next_to_a_linear_stays(body: Any) -> None:
    x = torch.randn(3, 4, 4)
    graph_module = by_export(x, body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    check_refused(FuseBatchNorm(), graph_module, x, "is 3-dimensional")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_before_a_linear_across_a_flatten(dims: int) -> None:
    x = _x(dims)
    features = x[0].numel()
    body = lambda m, x: m.layer(torch.flatten(m.norm(x), 1))  # noqa: E731
    for graph_module in (
        by_export(x, body, layer=nn.Linear(features, 5), norm=NORMS[dims](4)),
        by_fx(
            lambda m, x: m.layer(m.flat(m.norm(x))),
            layer=nn.Linear(features, 5),
            norm=NORMS[dims](4),
            flat=nn.Flatten(),
        ),
    ):
        check_applied(FuseBatchNorm(), graph_module, x)


def test_norm_across_another_flatten_stays() -> None:
    x = _x(2)
    graph_module = by_fx(
        lambda m, x: m.layer(torch.flatten(m.norm(x), 2)), layer=nn.Linear(30, 5), norm=nn.BatchNorm2d(4)
    )
    check_refused(FuseBatchNorm(), graph_module, x)


def test_norm_after_a_convolution_across_a_flatten_stays() -> None:
    graph_module = by_fx(
        lambda m, x: m.norm(torch.flatten(m.layer(x), 1)), layer=nn.Conv2d(4, 2, 1), norm=nn.BatchNorm1d(60)
    )
    check_refused(FuseBatchNorm(), graph_module, _x(2))


@pytest.mark.slow
@pytest.mark.parametrize("body", [_layer_then_norm, _norm_then_layer])
def test_across_operations_that_return_their_input(body: Any) -> None:
    def between(m: Any, x: torch.Tensor) -> Any:
        first, second = (m.layer, m.norm) if body is _layer_then_norm else (m.norm, m.layer)
        return second(m.dropout(m.identity(first(x))))

    x = _x(2)
    children = {"layer": nn.Conv2d(4, 4, 2), "norm": nn.BatchNorm2d(4), "identity": nn.Identity()}
    check_applied(FuseBatchNorm(), by_fx(between, **children, dropout=nn.Dropout(0.5)), x)
    check_applied(FuseBatchNorm(), by_export(x, between, **children, dropout=nn.Dropout(0.5)), x)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardswish()])
def test_an_activation_between_a_convolution_and_a_norm_is_a_reason(activation: nn.Module) -> None:
    children = {"layer": nn.Conv2d(4, 4, 1), "act": activation, "norm": nn.BatchNorm2d(4)}
    graph_module = by_export(_x(2), lambda m, x: m.norm(m.act(m.layer(x))), **children)
    check_refused(FuseBatchNorm(), graph_module, _x(2), "lies between layer and norm")


def test_intermediate_result_with_another_reader_is_skipped() -> None:
    graph_module = by_fx(
        lambda m, x: m.norm(y := m.identity(m.layer(x))) + y,
        layer=nn.Conv2d(4, 4, 1),
        norm=nn.BatchNorm2d(4),
        identity=nn.Identity(),
    )
    check_refused(FuseBatchNorm(), graph_module, _x(2), "has other users")


def test_norm_of_an_image_without_batch_axis_stays() -> None:
    x = torch.randn(4, 6, 5)
    graph_module = by_export(x, _layer_then_norm, layer=nn.Conv2d(4, 5, 1), norm=nn.BatchNorm1d(6))
    check_refused(FuseBatchNorm(), graph_module, x, "is 3-dimensional")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    x = _x(2).to(dtype)
    layer, norm = nn.Conv2d(4, 5, 2).to(dtype), nn.BatchNorm2d(5).to(dtype)
    check_applied(FuseBatchNorm(), by_export(x, _layer_then_norm, layer=layer, norm=norm), x)


def test_norms_on_both_sides_are_folded_into_the_same_layer() -> None:
    graph_module = by_export(
        _x(2),
        lambda m, x: m.after(m.layer(m.before(x))),
        before=nn.BatchNorm2d(4),
        layer=nn.Conv2d(4, 5, 2),
        after=nn.BatchNorm2d(5),
    )
    check_applied(FuseBatchNorm(), graph_module, _x(2), count=2)


@pytest.mark.parametrize("between", [nn.Identity, nn.Dropout, nn.Flatten])
def test_norm_across_a_module_with_hooks_stays(between: Any) -> None:
    module = between()
    module.register_forward_hook(lambda module, args, result: result + 1)
    x = torch.randn(3, 4)
    graph_module = by_fx(
        lambda m, x: m.layer(m.between(m.norm(x))), norm=nn.BatchNorm1d(4), between=module, layer=nn.Linear(4, 5)
    )
    check_refused(FuseBatchNorm(), graph_module, x)


def test_a_call_with_several_arguments_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return m.up(m.norm(x), output_size=[6, 5])

    layers = {"norm": nn.BatchNorm2d(4), "up": nn.ConvTranspose2d(4, 4, 1)}
    check_refused(FuseBatchNorm(), by_fx(body, **layers), _x(2))
    after = by_fx(lambda m, x: m.norm(m.up(x, output_size=[6, 5])), **layers)
    check_refused(FuseBatchNorm(), after, _x(2), "up: the module is not called with a single tensor")


def test_flatten_before_a_linear_of_other_sizes_is_skipped() -> None:
    layer = nn.Linear(120, 5)
    layer.in_features = 60
    graph_module = by_fx(lambda m, x: m.layer(torch.flatten(m.norm(x), 1)), layer=layer, norm=nn.BatchNorm2d(4))
    check_refused(FuseBatchNorm(), graph_module, _x(2), "the shape of the weight does not fit the sizes of the module")


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [_layer_then_norm, _norm_then_layer])
def test_norm_far_from_zero_is_folded_into_earlier_layers(body: Any) -> None:
    """After a layer, large products of the mean cancel; before the norm, they have canceled already."""
    x = torch.randn(3, 4)
    graph_module = by_export(x, body, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    with torch.no_grad():
        graph_module.norm.running_mean[1] = 1e6
    if body is _norm_then_layer:
        check_refused(FuseBatchNorm(), graph_module, x, "norm: a mean is more than 16 standard deviations from zero")
    else:
        check_applied(FuseBatchNorm(), graph_module, x)


def test_a_norm_into_an_infinite_weight_stays() -> None:
    x = torch.randn(3, 4)
    graph_module = by_export(x, _norm_then_layer, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
    with torch.no_grad():
        graph_module.layer.weight[0, 0] = torch.inf
        graph_module.norm.running_mean.zero_()
        graph_module.norm.bias.zero_()
    check_refused(FuseBatchNorm(), graph_module, None, "would overflow")


def test_cancelling_views_with_other_users_are_skipped() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            t = self.conv(x).transpose(1, 2)
            return self.norm(t.transpose(1, 2)), t * 2

    x = torch.randn(2, 4, 9)
    model = randomise(Forked())
    graph_module = symbolic_trace(model, example_inputs=(x,))
    expected = model(x)
    assert not run(FuseBatchNorm(), graph_module)[1].changes
    for output, expected_output in zip(graph_module(x), expected, strict=True):
        assert torch.equal(output, expected_output)


ROWS = torch.linspace(-2, 2, 60).reshape(3, 5, 4)


def _as_levit(m: Any, x: torch.Tensor) -> Any:
    y = m.layer(x)
    return m.norm(y.flatten(0, 1)).reshape_as(y)


SHAPES: dict[str, Any] = {
    "flatten and reshape_as": _as_levit,
    "view": lambda m, x: m.norm(m.layer(x).view(-1, 6)).view(x.shape[0], x.shape[1], 6),
    "transpose": lambda m, x: m.norm(m.layer(x).transpose(1, 2)).transpose(1, 2),
    "transpose and contiguous": lambda m, x: m.norm(m.layer(x).transpose(1, 2).contiguous()).mT,
    "movedim": lambda m, x: m.norm(m.layer(x).movedim(-1, 1)).swapaxes(1, 2),
    "permute of an image": lambda m, x: m.norm(m.layer(x).unsqueeze(2).permute(0, 3, 1, 2).flatten(2)),
    "sizes that are read": lambda m, x: (y := m.layer(x), m.norm(y.flatten(0, 1)).view(y.shape[0], -1, 6))[1],
    "a linear on both sides": lambda m, x: m.last(m.norm(m.layer(x).flatten(0, 1)).reshape(x.shape[0], -1, 6)),
    "an unflattened result": lambda m, x: m.norm(m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mT),
}


def _sequences(body: Any, **layers: nn.Module) -> GraphModule:
    dynamic = {"x": {0: Dim("batch", 1, 8), 1: Dim("length", 1, 16)}}
    program = randomise(Program(body, **layers)).eval()
    return symbolic_trace(program, example_inputs={"x": ROWS}, dynamic=dynamic)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHAPES)
def test_after_a_linear_across_changes_of_the_shape(name: str) -> None:
    layers = {"layer": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6), "last": nn.Linear(6, 2)}
    graph_module = _sequences(SHAPES[name], **layers)
    check_applied(FuseBatchNorm(), graph_module, ROWS)
    fused = run(FuseBatchNorm(), copy_sharing_modules(graph_module))[0]
    other = torch.randn(2, 7, 4)
    assert_close(outputs(fused, other), outputs(graph_module, other), "at another size")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.layer(m.norm(x.flatten(0, 1)).view(x.shape)),
        lambda m, x: m.layer(m.norm(x.transpose(1, 2)).transpose(1, 2)),
    ],
    ids=["view", "transpose"],
)
def test_before_a_linear_across_changes_of_the_shape(body: Any) -> None:
    graph_module = _sequences(body, layer=nn.Linear(4, 6), norm=nn.BatchNorm1d(4))
    check_applied(FuseBatchNorm(), graph_module, ROWS)


def test_convolution_and_norm_across_a_flatten_of_the_space() -> None:
    graph_module = by_export(
        _x(2), lambda m, x: m.norm(m.layer(x).flatten(2)), layer=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm1d(6)
    )
    check_applied(FuseBatchNorm(), graph_module, _x(2))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.norm(m.layer(x).view(x.shape[0], -1, 3, 2).transpose(2, 3).flatten(2).mT),
        lambda m, x: m.norm(m.layer(x).view(-1, 3, 2).mT.reshape(-1, 6)),
        lambda m, x: m.norm(m.layer(x).transpose(1, 2).reshape(-1, 6)),
        lambda m, x: m.norm(m.layer(x).transpose(1, 2).flatten(0, 1).view(-1, 6)),
        lambda m, x: m.norm(m.layer(x).roll(1, -1).flatten(0, 1)),
    ],
    ids=["split and swapped", "swapped parts", "joined with positions", "flattened across", "rolled"],
)
def test_change_of_the_shape_that_mixes_channels_stays(body: Any) -> None:
    x = torch.randn(2, 6, 4)
    graph_module = by_export(x, body, layer=nn.Linear(4, 6), norm=nn.BatchNorm1d(6))
    assert not run(FuseBatchNorm(), copy_sharing_modules(graph_module))[1].changes


def test_norm_of_positions_stays() -> None:
    x = torch.randn(3, 6, 4)
    graph_module = by_export(
        x,
        lambda m, x: m.norm(m.layer(x).transpose(1, 2).transpose(1, 2)),
        layer=nn.Linear(4, 6),
        norm=nn.BatchNorm1d(6),
    )
    check_refused(FuseBatchNorm(), graph_module, x, "is 3-dimensional")


def test_values_with_another_reader_across_a_view_are_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        y = m.layer(x)
        return m.norm(y.flatten(0, 1)).reshape_as(y) + y

    graph_module = by_export(ROWS, body, layer=nn.Linear(4, 6), norm=nn.BatchNorm1d(6))
    check_refused(FuseBatchNorm(), graph_module, ROWS, "the result of layer has other users")


@pytest.mark.slow
def test_all_norms_of_a_levit_are_fused() -> None:
    config = LevitConfig(
        image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[1, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    config.down_ops = [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2], [""]]
    images = {"pixel_values": torch.randn(2, 3, 64, 64)}
    model = randomise(LevitForImageClassification(config)).eval()
    graph_module = symbolic_trace(model, example_inputs=images, dynamic={"pixel_values": {0: "batch"}})
    check_applied(FuseBatchNorm(), graph_module, images, count=27)
    fused = run(FuseBatchNorm(), copy_sharing_modules(graph_module))[0]
    assert not calls(fused, nn.BatchNorm1d)
