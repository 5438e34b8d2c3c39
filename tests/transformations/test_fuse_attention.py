"""FuseAttention gives the same results, also for rows that are masked completely."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from optexport import symbolic_trace
from optexport.testing import check_applied, check_refused, copy_sharing_modules, outputs
from optexport.transformations import FuseAttention
from optexport.transformations.rule import run
from tests._helpers.graphs import Program, by_export, by_fx

aten = torch.ops.aten
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
MINUS = torch.finfo(torch.float32).min


def _heads(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [layer(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v)]


def _attention(scores: Callable[[Any, Any, Any], Any], soft: Any = None) -> Callable[[Any, torch.Tensor], Any]:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(m, x)
        weights = scores(x, q, k).softmax(-1) if soft is None else soft(scores(x, q, k))
        return (weights @ v).transpose(1, 2).reshape(x.shape)

    return body


def _graph(body: Callable[[Any, torch.Tensor], Any], x: torch.Tensor = X, **more: Any) -> GraphModule:
    layers = {name: nn.Linear(x.shape[-1], 8).to(x.dtype) for name in "qkv"}
    return by_export(x, body, **{**layers, **more})


def _calls(graph_module: GraphModule) -> list[Any]:
    changed, _ = run(FuseAttention(), copy_sharing_modules(graph_module))
    return changed.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)


def _hidden(x: torch.Tensor) -> torch.Tensor:
    """Returns a mask, computed from the input, whose first row hides everything."""
    hidden = (x.mean(-1) > 0.1) | (torch.arange(x.shape[0])[:, None] == 0)
    return hidden[:, None, None, :]


def _causal(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


@pytest.mark.sample(0, 4)
@pytest.mark.parametrize(
    ("scores", "scale"),
    [
        (lambda x, q, k: q @ k.transpose(-2, -1), 1.0),
        (lambda x, q, k: q @ k.transpose(2, 3) / 2, 0.5),
        (lambda x, q, k: q @ k.mT * 0.3, 0.3),
        (lambda x, q, k: 0.3 * (q @ k.mT), 0.3),
        (lambda x, q, k: q * 0.5 @ k.mT, 0.5),
        (lambda x, q, k: (q / 2) @ (k * 0.5).mT, 0.25),
        (lambda x, q, k: q @ (k.mT / math.sqrt(4)), 0.5),
        (lambda x, q, k: q @ k.mT / math.sqrt(q.shape[-1]), 0.5),
        (lambda x, q, k: q.matmul(k.permute(0, 1, 3, 2)).mul(2), 2.0),
        (lambda x, q, k: (q @ k.mT).mul_(0.5), 0.5),
        (lambda x, q, k: (q @ k.mT).div_(8), 0.125),
    ],
)
def test_factor_in_every_position(scores: Any, scale: float) -> None:
    graph_module = _graph(_attention(scores))
    check_applied(FuseAttention(), graph_module, X)
    (call,) = _calls(graph_module)
    assert call.kwargs == {"scale": scale}
    assert len(call.args) == 3


@pytest.mark.slow
def test_before_and_after() -> None:
    model = Program(lambda m, x: (x @ x.transpose(1, 2) / 4).softmax(-1) @ x)
    graph_module = symbolic_trace(model, example_inputs={"x": X}, dynamic={"x": {0: "batch", 1: "length"}})
    check_applied(FuseAttention(), graph_module, X)
    changed, _ = run(FuseAttention(), copy_sharing_modules(graph_module))
    assert [(node.name, str(node.target), str(node.args)) for node in changed.graph.nodes][1:-1] == [
        ("unsqueeze_default", "aten.unsqueeze.default", "(x, 1)"),
        ("unsqueeze_default_1", "aten.unsqueeze.default", "(x, 1)"),
        ("unsqueeze_default_2", "aten.unsqueeze.default", "(x, 1)"),
        (
            "scaled_dot_product_attention_default",
            "aten.scaled_dot_product_attention.default",
            "(unsqueeze_default, unsqueeze_default_1, unsqueeze_default_2)",
        ),
        ("matmul_1", "aten.squeeze.dim", "(scaled_dot_product_attention_default, 1)"),
    ]


@pytest.mark.slow
def test_three_axes_by_bmm() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        return torch.bmm((torch.bmm(q, k.transpose(1, 2)) / 4).softmax(-1), v)

    check_applied(FuseAttention(), _graph(body), X)


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize(
    "mask",
    [
        lambda x: torch.where(_hidden(x), MINUS, torch.zeros(())),
        lambda x: _hidden(x).float() * -1e9,
        lambda x: (1.0 - (~_hidden(x)).float()) * MINUS,
        lambda x: _hidden(x).float() * -10000.0,
        lambda x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(~_causal(x), -math.inf),
        lambda x: torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1),
    ],
)
def test_masks_that_are_added(mask: Any) -> None:
    check_applied(FuseAttention(), _graph(_attention(lambda x, q, k: q @ k.mT / 2 + mask(x))), X)
    check_applied(FuseAttention(), _graph(_attention(lambda x, q, k: mask(x) + q @ k.mT / 2)), X)


@pytest.mark.slow
def test_possibly_infinite_row_is_skipped() -> None:
    graph_module = _graph(
        _attention(lambda x, q, k: q @ k.mT + torch.where(_hidden(x), -math.inf, torch.zeros(()))),
    )
    assert all(out.isnan().any() for out in outputs(graph_module, X))
    check_refused(FuseAttention(), graph_module, X, "may be infinite in a whole row")
    original = _graph(_attention(lambda x, q, k: q @ k.mT + x[:1, None, :, :5]))
    check_refused(FuseAttention(), original, X, "may be infinite in a whole row")
    filled = _graph(_attention(lambda x, q, k: (q @ k.mT).masked_fill(_hidden(x), -math.inf)))
    check_refused(FuseAttention(), filled, X, "may hide a whole row by minus infinity")
    ends = _graph(_attention(lambda x, q, k: (q @ k.mT).masked_fill(_causal(x), -math.inf)))
    check_refused(FuseAttention(), ends, X, "may hide a whole row by minus infinity")


@pytest.mark.sample(0, 6)
@pytest.mark.parametrize("fill", [-math.inf, MINUS, -1e9, -1e4])
@pytest.mark.parametrize(
    "masked",
    [
        lambda x, scores, fill: scores.masked_fill(~_causal(x), fill),
        lambda x, scores, fill: scores.masked_fill(_causal(x) == 0, fill),
        lambda x, scores, fill: scores.masked_fill_(_causal(x) == 0, fill),
        lambda x, scores, fill: torch.where(_causal(x), scores, fill),
        lambda x, scores, fill: torch.where(_causal(x), scores, torch.full((), fill)),
        lambda x, scores, fill: torch.where(_causal(x) == 0, fill, scores),
    ],
)
def test_causal_masks_by_masked_fill(fill: float, masked: Any) -> None:
    graph_module = _graph(_attention(lambda x, q, k: masked(x, q @ k.mT / 2, fill)))
    check_applied(FuseAttention(), graph_module, X)
    (call,) = _calls(graph_module)
    assert call.args[3].meta["val"].dtype is torch.bool


class Tril(nn.Module):
    """A buffer with a causal mask for the longest sequence, as in hand-written decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(16, 16).tril().view(1, 1, 16, 16))


@pytest.mark.slow
def test_causal_mask_sliced_from_a_buffer() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(m, x)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(m.tril.bias[:, :, : x.shape[1], : x.shape[1]] == 0, float("-inf"))
        weights = nn.functional.dropout(nn.functional.softmax(scores, dim=-1), 0.1, training=False)
        return (weights @ v).transpose(1, 2).contiguous().view(x.shape)

    graph_module = _graph(body, tril=Tril())
    check_applied(FuseAttention(), graph_module, X)
    check_applied(FuseAttention(), graph_module, torch.randn(2, 9, 8))


@pytest.mark.slow
@pytest.mark.parametrize("fill", [MINUS, -1e30])
def test_row_fill_that_dominates_the_scores_is_fused(fill: float) -> None:
    masked: list[Any] = [
        lambda x, q, k: (q @ k.mT).masked_fill(_hidden(x), fill),
        lambda x, q, k: torch.where(~_hidden(x), q @ k.mT, fill),
    ]
    for scores in masked:
        check_applied(FuseAttention(), _graph(_attention(scores)), X)


@pytest.mark.slow
def test_row_fill_that_is_too_weak_is_skipped() -> None:
    graph_module = _graph(_attention(lambda x, q, k: (q @ k.mT).masked_fill(_hidden(x), -1e9)))
    check_refused(
        FuseAttention(), graph_module, X, "may hide a whole row by -1000000000.0, which does not absorb the scores"
    )
    weak = _graph(_attention(lambda x, q, k: (q @ k.mT).masked_fill(~_causal(x), -1.0)))
    check_refused(FuseAttention(), weak, X, "may hide a whole row by -1.0")


@pytest.mark.sample(0, 4)
@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (lambda x, q, k: q @ k.mT * -1.0, "the attention scores are multiplied by -1.0"),
        (lambda x, q, k: q @ k.mT * 0, "the attention scores are multiplied by 0.0"),
        (lambda x, q, k: q @ k.mT * x.mean(), "multiplied or divided by mean, which is not constant"),
        (lambda x, q, k: x.mean() * (q @ k.mT), "multiplied or divided by mean, which is not constant"),
        (lambda x, q, k: (q @ k.mT / 2) / torch.arange(1.0, 3.0)[:, None, None], "which is not constant"),
        (
            lambda x, q, k: (q @ k.mT + _causal(x).float()) * 0.5,
            "the attention scores are masked before they are scaled",
        ),
        (lambda x, q, k: q @ k.mT + _causal(x).float() + _causal(x).float(), "the attention has more than one mask"),
        (lambda x, q, k: q @ k.mT + _causal(x).double().float()[0], "has fewer than two axes"),
        (lambda x, q, k: (q[:, :, :1] @ k.mT) + _causal(x).float(), "the mask has more rows than the scores"),
        (lambda x, q, k: q[:, :1] @ k.mT, "differ in their leading sizes"),
        (lambda x, q, k: (q @ k.mT).half().float(), "the attention scores are cast to a narrower dtype"),
    ],
)
def test_skipped_graphs_report_the_reason(scores: Any, reason: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(m, x)
        return scores(x, q, k).softmax(-1) @ v

    check_refused(FuseAttention(), _graph(body), X, reason)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (m.q(x) @ m.k(x).mT).tanh().softmax(-1) @ m.v(x),
        lambda m, x: (m.q(x) @ m.k(x).mT).softmax(1) @ m.v(x),
        lambda m, x: (m.q(x) @ m.k(x).mT).softmax(-1).exp() @ m.v(x),
        lambda m, x: (m.q(x) @ m.k(x).mT) @ m.v(x),
        lambda m, x: m.q(x).softmax(-1) @ m.k(x).mT,
        lambda m, x: m.v(x).mT @ (m.q(x) @ m.k(x).mT).softmax(-1),
        lambda m, x: (m.q(x) * x.mean()).softmax(-1) @ m.v(x).mT,
        # Like Gemma 2: the added mask is a where of two numbers.
        lambda m, x: (
            ((m.q(x) @ m.k(x).mT).tanh() * 50 + torch.where(_causal(x), torch.zeros(5, 5), -1e9)).softmax(-1) @ m.v(x)
        ),
    ],
)
def test_other_graphs_are_ignored(body: Any) -> None:
    graph_module = _graph(body)
    check_refused(FuseAttention(), graph_module, X)


@pytest.mark.slow
def test_weights_and_scores_with_other_users_are_skipped() -> None:
    def weights(m: Any, x: torch.Tensor) -> Any:
        q, k, v = _heads(m, x)
        w = (q @ k.mT / 2).softmax(-1)
        return w @ v, w

    check_refused(FuseAttention(), _graph(weights), X, "softmax has other users")

    def scores(m: Any, x: torch.Tensor) -> Any:
        q, k, v = _heads(m, x)
        s = q @ k.mT / 2
        return s.softmax(-1) @ v, s

    check_refused(FuseAttention(), _graph(scores), X, "div has other users")


@pytest.mark.slow
def test_scaled_query_with_another_reader_stays() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        q = m.q(x) * 0.5
        return (q @ m.k(x).mT).softmax(-1) @ m.v(x), q

    graph_module = _graph(body)
    check_applied(FuseAttention(), graph_module, X)
    assert _calls(graph_module)[0].kwargs == {"scale": 1.0}


@pytest.mark.slow
def test_query_scaled_in_place_is_read_after_the_change() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        q = m.q(x)
        half = q.mul_(0.5)
        return (half @ m.k(x).mT).softmax(-1) @ m.v(x), q

    check_applied(FuseAttention(), _graph(body), X)


@pytest.mark.slow
def test_dropout_in_train_mode_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout((m.q(x) @ m.k(x).mT).softmax(-1), 0.1, training=True) @ m.v(x)

    check_refused(FuseAttention(), _graph(body), X, "the dropout of the attention is in train mode")


@pytest.mark.slow
def test_input_changed_in_between_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        weights = (q @ k.mT).softmax(-1)
        q.add_(1.0)
        return weights @ v + q

    check_refused(FuseAttention(), _graph(body), X, "linear is changed in place by add_ before the attention ends")

    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        half = q * 0.5
        q.add_(1.0)
        return (half @ k.mT).softmax(-1) @ v + q

    check_refused(FuseAttention(), _graph(scaled), X, "linear is changed in place by add_ before the attention ends")

    def masked(m: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1])
        scores = m.q(x) @ m.k(x).mT + mask
        mask.add_(1.0)
        return scores.softmax(-1) @ m.v(x) * mask.sum()

    assert not run(FuseAttention(), copy_sharing_modules(_graph(masked)))[1].changes


@pytest.mark.slow
def test_result_viewed_as_contiguous_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads(m, x)
        return ((q @ k.mT).softmax(-1) @ v).view(x.shape[0] * 2, x.shape[1], 4)

    check_refused(FuseAttention(), _graph(body), X, "view_3 may view the result")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    check_applied(FuseAttention(), _graph(_attention(lambda x, q, k: q @ k.mT / 2), x), x)
    upcast = _attention(
        lambda x, q, k: (q @ k.mT / 2).masked_fill(~_causal(x), -math.inf),
        lambda scores: nn.functional.softmax(scores, -1, dtype=torch.float32).to(scores.dtype),
    )
    graph_module = _graph(upcast, x)
    if dtype is torch.float64:
        check_refused(FuseAttention(), graph_module, x, "the attention scores are cast to a narrower dtype")
    else:
        check_applied(FuseAttention(), graph_module, x)


@pytest.mark.slow
def test_weakly_masked_rows_in_half_precision_are_skipped() -> None:
    for dtype, fill in ((torch.bfloat16, -1e4), (torch.float16, -65504.0)):
        graph_module = _graph(_attention(lambda x, q, k: q @ k.mT + _hidden(x).to(x.dtype) * fill), X.to(dtype))  # noqa: B023
        check_refused(FuseAttention(), graph_module, X.to(dtype), "rounds scores in half precision")
    drowned = torch.finfo(torch.bfloat16).min
    x = X.to(torch.bfloat16)
    check_applied(
        FuseAttention(), _graph(_attention(lambda x, q, k: q @ k.mT + _hidden(x).to(x.dtype) * drowned), x), x
    )
    filled = _attention(
        lambda x, q, k: (q @ k.mT).float().masked_fill(_hidden(x), MINUS),
        lambda scores: scores.softmax(-1).to(torch.bfloat16),
    )
    check_applied(FuseAttention(), _graph(filled, x), x)
    # This mask is infinite in bfloat16.
    narrowed = _graph(_attention(lambda x, q, k: (q @ k.mT).float().masked_fill(_hidden(x), MINUS).to(x.dtype)), x)
    check_refused(FuseAttention(), narrowed, x, "the attention scores are cast to a narrower dtype")


@pytest.mark.slow
def test_a_mask_of_another_dtype_is_skipped() -> None:
    x = X.to(torch.bfloat16)
    wide = _attention(
        lambda x, q, k: (q @ k.mT).float() + torch.where(_hidden(x), MINUS, torch.zeros(())),
        lambda scores: scores.softmax(-1).to(torch.bfloat16),
    )
    check_refused(FuseAttention(), _graph(wide, x), x, "has another dtype")


@pytest.mark.slow
def test_empty_sequences() -> None:
    graph_module = by_export(
        X,
        lambda m, x: (m.q(x) @ m.k(x).mT / 2).softmax(-1) @ m.v(x),
        **{name: nn.Linear(8, 8) for name in "qkv"},
    )
    check_applied(FuseAttention(), graph_module, torch.zeros(0, 5, 8))


def test_graph_with_unknown_shapes_is_skipped() -> None:
    check_refused(FuseAttention(), by_fx(lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x), X)
    graph_module = by_export(X, lambda m, x: (x @ x.transpose(1, 2) / 4).softmax(-1) @ x)
    for node in graph_module.graph.nodes:
        node.meta.pop("val", None)
    check_refused(
        FuseAttention(), graph_module, X, "the shapes of the attention are unknown (trace with example inputs)"
    )
