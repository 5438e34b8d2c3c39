"""MergeParallelConvs with norms and inputs among the terms, and the blocks of RepVGG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from transformers import RTDetrConfig, RTDetrModel, RTDetrResNetConfig
from transformers.models.rt_detr.modeling_rt_detr import RTDetrRepVggBlock

from optexport import symbolic_trace
from optexport.testing import assert_close, check_applied, check_refused, copy_sharing_modules, outputs
from optexport.transformations import FuseBatchNorm, FuseBias, compose
from optexport.transformations.rule import run
from tests._helpers.graphs import by_export, by_fx, calls
from tests._helpers.models import randomise
from tests.transformations.test_merge_parallel_convs import RULE, _pair, _two, _x


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), "norm: the norm has no running statistics"),
        (nn.BatchNorm2d(4).double(), "the layers differ in dtype or device"),
        (nn.BatchNorm2d(4).requires_grad_(False), "the layers differ in requires_grad"),
    ],
)
def test_norm_that_cannot_be_a_kernel_is_skipped(norm: nn.BatchNorm2d, reason: str) -> None:
    check_refused(RULE, by_fx(lambda m, x: m.a(x) + m.norm(x), **_pair(), norm=norm), None, reason)


def test_a_norm_in_train_mode_is_skipped() -> None:
    graph_module = by_fx(lambda m, x: m.a(x) + m.norm(x), **_pair(), norm=nn.BatchNorm2d(4))
    graph_module.get_submodule("norm").train()
    check_refused(RULE, graph_module, None, "norm: the norm is in train mode")


@pytest.mark.sample(1)
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_with_and_without_weights(affine: bool) -> None:
    graph_module = by_export(
        _x(), lambda m, x: m.a(x) + m.norm(x), **_pair(bias=False), norm=nn.BatchNorm2d(4, affine=affine)
    )
    check_applied(RULE, graph_module, _x())


def test_a_norm_of_unknown_rank_is_skipped() -> None:
    children = {"a": nn.Conv1d(4, 4, 3, padding=1), "norm": nn.BatchNorm1d(4)}
    # For two axes, the norm's channels are the last axis, and the convolution's channels the first.
    square = torch.randn(4, 4)
    graph_module = by_fx(lambda m, x: m.a(x) + m.norm(x), **children)
    check_refused(RULE, graph_module, None, "the input of norm is not known to have 3 dimensions")
    exported = by_export(square, lambda m, x: m.a(x) + m.norm(x), **children)
    check_refused(RULE, exported, square, "the input of norm is not known to have 3 dimensions")


def test_single_image_without_a_batch_axis() -> None:
    graph_module = by_fx(lambda m, x: m.a(x) + m.b(x) + x, **_pair())
    check_applied(RULE, graph_module, _x()[0])


def test_convolutions_with_a_broadcast_sum_are_skipped() -> None:
    graph_module = by_fx(_two, **_pair(out_channels=[4, 1]))
    check_refused(RULE, graph_module, _x(), "the convolutions differ in channels, groups or stride")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    children = {name: child.to(dtype) for name, child in {**_pair(), "norm": nn.BatchNorm2d(4)}.items()}
    graph_module = by_export(_x().to(dtype), lambda m, x: m.a(x) + m.b(x) + x + m.norm(x), **children)
    check_applied(RULE, graph_module, _x().to(dtype))


@pytest.mark.slow
def test_result_is_written_like_this() -> None:
    graph_module = by_fx(lambda m, x: m.a(x) + m.b(x) + x, **_pair())
    merged, report = run(RULE, copy_sharing_modules(graph_module))
    assert str(merged.graph).strip().split("\n") == [
        "graph():",
        "    %x : [num_users=1] = placeholder[target=x]",
        "    %a : [num_users=1] = call_module[target=a](args = (%x,), kwargs = {})",
        "    return a",
    ]
    assert report.changes[0].replaced == ("a", "b", "add", "add_1")


def test_the_sum_of_two_kernels_and_the_input() -> None:
    children = {"a": nn.Conv1d(1, 1, 3, padding=1), "b": nn.Conv1d(1, 1, 1)}
    graph_module = by_fx(lambda m, x: m.a(x) + m.b(x) + x, **children)
    with torch.no_grad():
        children["a"].weight.copy_(torch.tensor([[[1.0, 2.0, 3.0]]]))
        children["b"].weight.fill_(10.0)
        children["a"].bias.fill_(0.5)  # type: ignore[union-attr]
        children["b"].bias.fill_(0.25)  # type: ignore[union-attr]
    merged, _ = run(RULE, copy_sharing_modules(graph_module))
    assert {name: value.flatten().tolist() for name, value in merged.state_dict().items()} == {
        "a.weight": [1.0, 13.0, 3.0],
        "a.bias": [0.75],
    }


def _rt_detr_block() -> GraphModule:
    config = RTDetrConfig(encoder_hidden_dim=8, hidden_expansion=1.0, activation_function="silu")
    model = randomise(RTDetrRepVggBlock(config))
    return symbolic_trace(model, example_inputs=[torch.randn(2, 8, 6, 6)])


def test_the_repvgg_block_of_rt_detr_becomes_one_convolution() -> None:
    graph_module = _rt_detr_block()
    x = torch.randn(3, 8, 6, 6)
    merged = compose(FuseBatchNorm(), FuseBias(), RULE)(copy_sharing_modules(graph_module))
    assert len(calls(merged, nn.Conv2d)) == 1
    assert_close(outputs(merged, x), outputs(graph_module, x), "merged")


@pytest.mark.nightly
def test_all_repvgg_blocks_of_rt_detr() -> None:
    backbone = RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8] * 4,
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[8] * 3,
        decoder_in_channels=[16] * 3,
        **dict.fromkeys(("encoder_hidden_dim", "d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_n_points"), 2),
        decoder_layers=1,
        num_queries=5,
        num_denoising=0,
        anchor_image_size=None,
    )
    x = {"pixel_values": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
    graph_module = symbolic_trace(randomise(RTDetrModel(config)), example_inputs=x)
    folded, _ = run(FuseBatchNorm(), copy_sharing_modules(graph_module))
    merged, report = run(RULE, folded)
    assert len(report.changes) == 12
    assert_close(outputs(merged, x), outputs(graph_module, x), "merged")


@pytest.mark.sample(1)
@pytest.mark.parametrize("term", [lambda m, x: m.linear(x), lambda m, x: 1.0, lambda m, x: x.relu()])
def test_long_sum_of_other_terms_is_ignored(term: Any) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        total = m.linear(x)
        for _ in range(1500):
            total = total + term(m, x)
        return total

    check_refused(RULE, by_fx(body, linear=nn.Linear(4, 4)), None)


def test_norm_far_from_zero_stays_next_to_a_convolution() -> None:
    graph_module = by_export(_x(), lambda m, x: m.a(x) + m.norm(x), a=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4))
    with torch.no_grad():
        graph_module.norm.running_mean.fill_(1e6)  # type: ignore[operator, union-attr]
    check_refused(RULE, graph_module, None, "norm: a mean is more than 16 standard deviations from zero")


_VIEWED: dict[str, Callable[[Any, Any], Any]] = {
    "x": lambda m, x: (x + m.a(x)).transpose(2, 3).view(3, -1),
    "after an activation": lambda m, x: (x + m.a(x)).relu().transpose(2, 3).view(3, -1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", _VIEWED)
@pytest.mark.parametrize("exported", [True, False])
def test_a_sum_with_a_view_that_fits_only_the_input_is_skipped(how: str, exported: bool) -> None:
    body = lambda m, x: _VIEWED[how](m, x.transpose(2, 3))  # noqa: E731
    conv = nn.Conv2d(4, 4, 3, padding=1)
    graph_module = by_export(_x(), body, a=conv) if exported else by_fx(body, a=conv)
    check_refused(RULE, graph_module, _x(), "view may view the sum")


def test_a_sum_with_a_contiguous_input_may_be_viewed() -> None:
    graph_module = by_export(_x(), lambda m, x: (x + m.a(x)).relu().view(3, -1), a=nn.Conv2d(4, 4, 3, padding=1))
    check_applied(RULE, graph_module, _x())
