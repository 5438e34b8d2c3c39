"""FuseAttention on models of transformers: matches and skips."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import optexport
from optexport import symbolic_trace
from optexport.testing import check_applied, check_refused, copy_sharing_modules, outputs
from optexport.transformations import FuseAttention
from optexport.transformations.rule import run
from tests._helpers.graphs import Program, by_export
from tests._helpers.models import randomise
from tests.transformations.test_fuse_attention import X, _attention, _causal, _graph

_TEXT: dict[str, Any] = {"vocab_size": 60, "max_position_embeddings": 40}
_LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
_BART: dict[str, Any] = {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    "attn_implementation": "eager",
}
_EAGER: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "albert": (2, lambda: AlbertModel(AlbertConfig(**_TEXT, **_LAYERS, embedding_size=8))),
    "bart": (3, lambda: BartModel(BartConfig(**_TEXT, **_BART, d_model=16, encoder_layers=1, decoder_layers=1))),
    "bert": (2, lambda: BertModel(BertConfig(**_TEXT, **_LAYERS))),
    "gpt2": (
        2,
        lambda: GPT2Model(
            GPT2Config(vocab_size=60, n_positions=40, n_embd=16, n_layer=2, n_head=4, attn_implementation="eager")
        ),
    ),
    "llama": (2, lambda: LlamaForCausalLM(LlamaConfig(**_TEXT, **_LAYERS, num_key_value_heads=2))),
    "vit": (2, lambda: ViTForImageClassification(ViTConfig(**_LAYERS, image_size=16, patch_size=8))),
}


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", sorted(_EAGER))
def test_the_eager_attention_of_transformers(name: str, dtype: torch.dtype) -> None:
    count, factory = _EAGER[name]
    names = None if name in ("bart", "vit") else ["input_ids", "attention_mask"]
    graph_module = symbolic_trace(randomise(factory()).to(dtype), input_names=names)
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[0, 3:], mask[1], mask[2, :3] = 0, 0, 0
    all_inputs = {
        "input_ids": torch.randint(4, 60, (3, 7)),
        "decoder_input_ids": torch.randint(4, 60, (3, 6)),
        "attention_mask": mask,
        "pixel_values": torch.randn(3, 3, 16, 16).to(dtype),
    }
    inputs = {node.target: all_inputs[node.target] for node in graph_module.graph.find_nodes(op="placeholder")}
    check_applied(FuseAttention(), graph_module, inputs, count)


@pytest.mark.slow
def test_requested_attention_weights_stay() -> None:
    model = randomise(BertModel(BertConfig(**_TEXT, **_LAYERS, output_attentions=True)))
    graph_module = symbolic_trace(model, input_names=["input_ids", "attention_mask"])
    _, report = run(FuseAttention(), copy_sharing_modules(graph_module))
    assert not report.changes
    assert len(report.near_misses) == 2
    assert all("has other users" in miss.reason for miss in report.near_misses)


def _in_three_axes(m: Any, x: torch.Tensor) -> Any:
    return (m.q(x) @ m.k(x).mT / 2).masked_fill(~_causal(x), -math.inf).softmax(-1) @ m.v(x)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bert", "three axes and a mask of booleans"])
def test_the_call_is_exported(tmp_path: Path, name: str) -> None:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, 3:] = 0
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.randint(4, 60, (2, 7)), "attention_mask": mask}
    model = randomise(_EAGER["bert"][1]())
    if name != "bert":
        model, inputs = randomise(Program(_in_three_axes, **{n: nn.Linear(8, 8) for n in "qkv"})), {"x": X}
    result = optexport.export(model, inputs, tmp_path / "out", transformations=FuseAttention())
    assert {"graph", "torchscript", "onnx"} <= {place.target for place in result.parity}


@pytest.mark.slow
def test_scores_in_a_wider_dtype_are_reported_as_wider() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(m.q(x) @ m.k(x).mT, -1, dtype=torch.float64).float() @ m.v(x)

    check_refused(FuseAttention(), _graph(body), X, "the attention scores are cast to a wider dtype")


def test_a_mask_that_hides_a_row_by_rounding_is_skipped() -> None:
    def scores(x: torch.Tensor, q: Any, k: Any) -> Any:
        return (q @ k.mT).masked_fill(torch.full((5, 5), 0.1) == 0.1, -math.inf)

    graph_module = _graph(_attention(scores))
    assert outputs(graph_module, X)[0].isnan().all()
    check_refused(FuseAttention(), graph_module, X, "may hide a whole row by minus infinity")


def test_a_fill_that_the_scores_cannot_hold_is_skipped() -> None:
    graph_module = _graph(_attention(lambda x, q, k: (q @ k.mT).masked_fill(~_causal(x), -1e300)))
    check_refused(FuseAttention(), graph_module, None, "the attention scores are filled with -1e+300")


def test_fill_with_a_constant_tensor_of_the_model() -> None:
    graph_module = _graph(_attention(lambda x, q, k: torch.where(_causal(x), q @ k.mT, torch.tensor(-1e38))))
    check_applied(FuseAttention(), graph_module, X)


@pytest.mark.slow
def test_a_head_size_that_is_not_fixed_is_skipped() -> None:
    model = Program(lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x)
    graph_module = symbolic_trace(model, example_inputs={"x": X}, dynamic={"x": {2: "width"}})
    check_refused(FuseAttention(), graph_module, X, "the head size is not fixed")


class Bmm(nn.Module):
    """Attention where torch.export asserts equal sizes by operator.and_, which is not an in-place operation."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


@pytest.mark.slow
def test_compared_sizes_do_not_count_as_changed_queries() -> None:
    inputs = {name: torch.randn(3, 5 + (name != "q"), 8) for name in "qkv"}
    axes = {"q": {0: "batch", 1: "length"}, "k": {0: "batch", 1: "keys"}, "v": {0: "batch", 1: "keys"}}
    graph_module = symbolic_trace(Bmm(), example_inputs=inputs, dynamic=axes)
    assert graph_module.graph.find_nodes(op="call_function", target=operator.and_)
    check_applied(FuseAttention(), graph_module, inputs)


@pytest.mark.slow
def test_a_result_that_is_split_and_viewed_is_skipped() -> None:
    class Split(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.25, -1)
            return torch.matmul(weights, v).reshape(2, 4, 7, 8, 2).view(2, 28, 16)

    inputs = tuple(torch.randn(2, 7, 4, 16) for _ in range(3))
    graph_module = FuseAttention()(symbolic_trace(Split(), example_inputs=inputs, dynamic={}))
    torch.testing.assert_close(graph_module(*inputs), Split()(*inputs))


@pytest.mark.slow
def test_a_result_viewed_after_an_activation_is_contiguous() -> None:
    heads = torch.linspace(-1, 1, 256).reshape(1, 2, 8, 16)
    body = lambda m, x: (torch.softmax(x @ (x * 2.0).mT * 0.5, -1) @ (x * 3.0)).relu().view(16, 16)  # noqa: E731
    check_refused(FuseAttention(), by_export(heads, body), heads, "requires contiguous memory")
