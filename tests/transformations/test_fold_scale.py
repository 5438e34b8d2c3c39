"""FoldScale folds factors before and after a layer."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import WhisperConfig, WhisperModel

from optexport import symbolic_trace
from optexport.testing import check_applied, check_refused, copy_sharing_modules
from optexport.transformations import FoldScale
from optexport.transformations.rule import run
from tests._helpers.graphs import Inherited, by_export, by_fx
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-2, 2, 96).reshape(2, 3, 4, 4)
ROWS = torch.linspace(-2, 2, 120).reshape(3, 5, 8)


class Held(nn.Module):
    """A buffer with a fixed value; the parameters of a program are random."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [0.5, 4, 0.3, -7])
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x, c: m.layer(x) * c,
        lambda m, x, c: c * m.layer(x),
        lambda m, x, c: m.layer(x) / c,
        lambda m, x, c: m.layer(x * c),
        lambda m, x, c: m.layer(x / c),
    ],
)
def test_number_before_or_after_a_linear(body: Any, factor: float, bias: bool) -> None:
    graph_module = by_export(X, lambda m, x: body(m, x, factor), layer=nn.Linear(4, 5, bias=bias))
    check_applied(FoldScale(), graph_module, X, exact=factor in (0.5, 4))
    changed, _ = run(FoldScale(), copy_sharing_modules(graph_module))
    assert not {operator.mul, operator.truediv} & {node.target for node in changed.graph.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 6, 3, padding=1, groups=3),
        nn.Conv2d(3, 4, 2, bias=False),
        nn.ConvTranspose2d(3, 4, 2),
    ],
)
def test_number_before_or_after_a_convolution(layer: nn.Module, before: bool) -> None:
    body = (lambda m, x: m.layer(x * 0.3)) if before else (lambda m, x: m.layer(x) * 0.3)
    check_applied(FoldScale(), by_export(IMAGE, body, layer=layer), IMAGE)


def test_reflection_padding() -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    check_applied(FoldScale(), by_fx(lambda m, x: m.layer(x) * 0.3, layer=layer), IMAGE)


def test_other_ranks() -> None:
    for cls, x in ((nn.Conv1d, IMAGE[:, :, 0]), (nn.Conv3d, IMAGE[:, None].expand(2, 3, 3, 4, 4).contiguous())):
        check_applied(FoldScale(), by_export(x, lambda m, x: m.layer(x) / 3, layer=cls(3, 4, 2)), x)


def test_queries_scaled_after_the_split_into_heads() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.q(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) * 0.5

    check_applied(FoldScale(), by_export(ROWS, body, q=nn.Linear(8, 8)), ROWS, exact=True)


@pytest.mark.slow
def test_all_layers_that_read_a_product() -> None:
    layers = {"q": nn.Linear(4, 3), "k": nn.Linear(4, 3)}
    graph_module = by_export(X, lambda m, x: m.q(y := x * 3) - m.k(y.unsqueeze(0))[0], **layers)
    report = check_applied(FoldScale(), graph_module, X)
    assert report.changes[0].nodes == ("linear", "linear_1")
    mixed = by_export(X, lambda m, x: m.q(y := x * 3) - m.k(y) + y[:, :3], **layers)
    check_refused(FoldScale(), mixed, X, "has other users")


def test_a_factor_between_two_layers_is_folded_into_one() -> None:
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    report = check_applied(FoldScale(), by_export(X, lambda m, x: m.two(m.one(x) * 3), **layers), X)
    assert report.changes[0].target == "one"
    report = check_applied(FoldScale(), by_export(X, lambda m, x: m.two((y := m.one(x)) * 3) + y, **layers), X)
    assert report.changes[0].target == "two"


@pytest.mark.slow
def test_consecutive_factors() -> None:
    graph_module = by_export(X, lambda m, x: m.layer((x * 3).unsqueeze(0) * 5) / 7 * 2, layer=nn.Linear(4, 4))
    check_applied(FoldScale(), graph_module, X, count=4)
    layers = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    graph_module = by_export(X, lambda m, x: m.one((y := x * 3) * 5) + m.two(y), **layers)
    check_applied(FoldScale(), graph_module, X, count=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor", [torch.tensor(0.3), torch.tensor(3), torch.tensor([0.3]), torch.tensor(0.3).double()]
)
def test_a_constant_tensor_of_one_element(tensor: torch.Tensor) -> None:
    graph_module = by_export(X, lambda m, x: m.layer(x) * m.held.tensor, layer=nn.Linear(4, 5), held=Held(tensor))
    check_applied(FoldScale(), graph_module, X)
    changed, _ = run(FoldScale(), copy_sharing_modules(graph_module))
    assert list(changed.state_dict()) == ["layer.weight", "layer.bias"]


@pytest.mark.slow
def test_a_constant_that_changes_shape_or_dtype_is_skipped() -> None:
    for tensor in (torch.full((1, 1, 1), 0.3), torch.tensor([0.3]).double()):
        graph_module = by_export(X, lambda m, x: m.layer(x) * m.held.tensor, layer=nn.Linear(4, 5), held=Held(tensor))
        check_refused(FoldScale(), graph_module, X, "differ in shape or dtype")
    vector = by_export(X, lambda m, x: m.layer(x) * m.held.tensor, layer=nn.Linear(4, 5), held=Held(torch.ones(5)))
    check_refused(FoldScale(), vector, X)


@pytest.mark.slow
def test_constant_changed_by_the_graph_is_not_a_constant() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.held.tensor.add_(1.0)
        return m.layer(x) * m.held.tensor

    graph_module = by_export(X, body, layer=nn.Linear(4, 4), held=Held(torch.tensor(0.5)))
    assert not run(FoldScale(), copy_sharing_modules(graph_module))[1].changes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda m, x: (y := m.layer(x)) * 3 + y, "the result of layer has other users"),
        (lambda m, x: m.layer(x) * 3 + m.layer(x + 1), "the module is called more than once"),
        (lambda m, x: m.layer(x) * 0, "the factor of layer is 0"),
        (lambda m, x: m.layer(x) / 0, "the factor of layer is inf"),
        (lambda m, x: m.layer(x) * float("nan"), "the factor of layer is nan"),
        (lambda m, x: m.layer(x) * 1e-38, "the factor of layer is 1e-38"),
        (lambda m, x: m.layer(x) * 1e39, "the factor of layer is 1e+39"),
        (lambda m, x: m.layer(x) * 10**400, "the factor of layer is inf"),
        (lambda m, x: m.layer(x) * 3 + m.layer.weight, "the graph also reads the weight directly"),
    ],
)
def test_skipped_graphs_report_the_reason(body: Any, reason: str) -> None:
    check_refused(FoldScale(), by_fx(body, layer=nn.Linear(4, 4)), None, reason)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.layer(x).relu() * 3,
        lambda m, x: m.layer(x)[:, :2] * 3,
        lambda m, x: m.layer(x) * x,
        lambda m, x: m.layer(x) * (x.shape[0] / 7),
        lambda m, x: 3 / m.layer(x),
        lambda m, x: x * 3,
    ],
)
def test_unrelated_graphs_are_ignored(body: Any) -> None:
    check_refused(FoldScale(), by_export(X, body, layer=nn.Linear(4, 4)), X)


def test_without_shapes_a_factor_before_a_layer_is_skipped() -> None:
    check_refused(FoldScale(), by_fx(lambda m, x: m.layer(x * 3), layer=nn.Linear(4, 4)), X, "dtype of x is unknown")


def test_integers_before_a_layer_are_skipped() -> None:
    x = torch.arange(12).reshape(3, 4)
    graph_module = by_export(x, lambda m, x: m.layer(x * 0.5), layer=nn.Linear(4, 4))
    check_refused(FoldScale(), graph_module, x, "differ in shape or dtype")


def test_input_changed_before_its_reader_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = x * 3
        x.add_(1.0)
        return m.layer(y) + x

    check_refused(FoldScale(), by_export(X, body, layer=nn.Linear(4, 4)), X, "is changed in place by add_")


@pytest.mark.slow
def test_result_changed_in_place_includes_the_factor() -> None:
    check_applied(FoldScale(), by_export(X, lambda m, x: (m.layer(x) * 3).add_(1.0), layer=nn.Linear(4, 4)), X)

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.layer(x)
        y.add_(1.0)
        return y * 3

    check_refused(FoldScale(), by_export(X, body, layer=nn.Linear(4, 4)), X)


@pytest.mark.slow
def test_product_viewed_as_contiguous_is_skipped() -> None:
    graph_module = by_export(
        ROWS, lambda m, x: m.layer((x.transpose(1, 2) * 3).mT.view(x.shape)), layer=nn.Linear(8, 4)
    )
    check_refused(FoldScale(), graph_module, ROWS, "requires contiguous memory")
    flat = by_export(ROWS, lambda m, x: m.layer((x[:, :2] * 3).flatten(1)), layer=nn.Linear(16, 4))
    check_applied(FoldScale(), flat, ROWS)


@pytest.mark.slow
def test_shared_and_modified_layers_are_skipped() -> None:
    tied = nn.Linear(4, 4)
    tied_layer = nn.Linear(4, 4)
    tied_layer.weight = tied.weight
    graph_module = by_fx(lambda m, x: m.tied(x) * 3 + m.other(x), tied=tied, other=tied_layer)
    check_refused(FoldScale(), graph_module, X, "the weight is tied to other.weight")
    check_refused(FoldScale(), by_fx(lambda m, x: m.layer(x) * 3, layer=Inherited(4, 4)), X, "Inherited is a subclass")
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    check_refused(FoldScale(), by_fx(lambda m, x: m.layer(x) * 3, layer=hooked), X, "the module has hooks")
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert not run(FoldScale(), by_fx(lambda m, x: m.layer(x) * 3, layer=normed))[1].changes


@pytest.mark.slow
def test_dropout_between() -> None:
    graph_module = by_fx(lambda m, x: m.drop(m.layer(x)) * 3, layer=nn.Linear(4, 4), drop=nn.Dropout())
    check_applied(FoldScale(), graph_module, X)
    graph_module.drop.train()
    assert not run(FoldScale(), copy_sharing_modules(graph_module))[1].changes


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [0.25, 0.3])
def test_other_precisions(dtype: torch.dtype, factor: float) -> None:
    graph_module = by_export(X.to(dtype), lambda m, x: m.layer(x) * factor, layer=nn.Linear(4, 5).to(dtype))
    check_applied(FoldScale(), graph_module, X.to(dtype), exact=factor == 0.25)


@pytest.mark.parametrize("factor", [6e4, 1e-4])
def test_weights_that_would_overflow_are_skipped(factor: float) -> None:
    x = X.half()
    graph_module = by_export(x, lambda m, x: m.layer(x) * factor, layer=nn.Linear(4, 5).half())
    with torch.no_grad():
        graph_module.layer.weight.mul_(2 if factor > 1 else 0.01)  # type: ignore[operator, union-attr]
    check_refused(FoldScale(), graph_module, None, "overflow or become subnormal")


def test_a_factor_that_would_overflow_before_cancelling() -> None:
    graph_module = by_fx(lambda m, x: m.layer(x) * 1e30, layer=nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        graph_module.layer.weight.copy_(torch.tensor([[1.0, -1.0]]))  # type: ignore[operator, union-attr]
    check_refused(FoldScale(), graph_module, torch.full((1, 2), 1e10), "the factor of layer is 1e+30")


def test_constant_held_by_a_called_layer_stays_for_it() -> None:
    graph_module = by_export(
        X, lambda m, x: (m.layer(x) * m.norm.weight, m.norm(x[:, :1])), layer=nn.Linear(4, 5), norm=nn.BatchNorm1d(1)
    )
    check_applied(FoldScale(), graph_module, X)


def test_a_thousand_no_ops_after_a_product() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        x = x * 3
        for _ in range(1100):
            x = x.reshape(3, 4)
        return m.layer(x)

    check_refused(FoldScale(), by_fx(body, layer=nn.Linear(4, 5)), None, "dtype of x is unknown")


def test_flags_are_kept() -> None:
    layer = nn.Linear(4, 5)
    layer.weight.requires_grad_(False)
    check_applied(FoldScale(), by_export(X, lambda m, x: m.layer(x) * 3, layer=layer), X)


@pytest.mark.slow
def test_the_queries_of_whisper() -> None:
    config = WhisperConfig(
        vocab_size=60,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        num_mel_bins=4,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        max_source_positions=10,
        max_target_positions=10,
    )
    inputs = {"input_features": torch.randn(2, 4, 20), "decoder_input_ids": torch.randint(4, 60, (2, 5))}
    graph_module = symbolic_trace(randomise(WhisperModel(config)), example_inputs=inputs)
    check_applied(FoldScale(), graph_module, inputs, 3)
