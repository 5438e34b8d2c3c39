"""SinkSelect computes only the selected rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from optexport import symbolic_trace
from optexport.testing import assert_close, check_applied, check_laws, check_refused, copy_sharing_modules, outputs
from optexport.transformations import KeepOutputs, MergeLinears, SinkSelect, compose
from optexport.transformations.rule import run
from tests._helpers.graphs import by_export, by_fx, calls
from tests._helpers.models import randomise

X = torch.randn(3, 5, 8)


def _rows(graph_module: GraphModule, name: str) -> Any:
    """Returns the number of positions that a linear computes."""
    (call,) = [node for node in calls(graph_module, nn.Linear) if node.target == name]
    size = call.meta["val"].shape[1]
    return size if type(size) is int else str(size)


def _feed_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(x + m.down(nn.functional.gelu(m.up(x))))


_CHILDREN: dict[str, Any] = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "norm": nn.LayerNorm(8)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("index", [0, 1, -1])
def test_a_feed_forward_is_computed_at_one_position(index: int) -> None:
    graph_module = by_export(X, lambda m, x: _feed_forward(m, x)[:, index], **copy.deepcopy(_CHILDREN))
    check_applied(SinkSelect(), graph_module, X)
    changed, _ = run(SinkSelect(), copy_sharing_modules(graph_module))
    assert (_rows(changed, "up"), _rows(changed, "down")) == (1, 1)
    assert_close(
        outputs(changed, torch.randn(2, 9, 8).fill_(0.3)), outputs(graph_module, torch.randn(2, 9, 8).fill_(0.3)), "9"
    )


@pytest.mark.slow
def test_positions_along_any_axis() -> None:
    graph_module = by_export(X, lambda m, x: m.up(x)[1] * 2, up=nn.Linear(8, 4))
    check_applied(SinkSelect(), graph_module, X)
    last = by_export(X, lambda m, x: m.up(x)[:, :, 0], up=nn.Linear(8, 4))
    check_refused(SinkSelect(), last, X)


@pytest.mark.slow
def test_result_that_is_also_used_whole_is_skipped() -> None:
    graph_module = by_export(X, lambda m, x: ((y := _feed_forward(m, x))[:, 0], y), **copy.deepcopy(_CHILDREN))
    check_refused(SinkSelect(), graph_module, X, "output also reads other positions of layer_norm")


def test_two_positions_are_skipped() -> None:
    graph_module = by_export(X, lambda m, x: (y := _feed_forward(m, x))[:, 0] + y[:, 1], **copy.deepcopy(_CHILDREN))
    _, report = run(SinkSelect(), copy_sharing_modules(graph_module))
    assert not report.changes
    check_laws(SinkSelect(), graph_module, X, exact=True)


@pytest.mark.slow
def test_position_that_is_read_twice_counts_once() -> None:
    graph_module = by_export(X, lambda m, x: (y := _feed_forward(m, x)[:, 0]) * y.exp(), **copy.deepcopy(_CHILDREN))
    check_applied(SinkSelect(), graph_module, X)


@pytest.mark.slow
def test_cheap_work_is_not_worth_a_slice() -> None:
    check_refused(SinkSelect(), by_export(X, lambda m, x: (x * 2 + 1).tanh()[:, 0]), X)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "mixes",
    [
        lambda m, x: m.up(x).cumsum(1)[:, 0],
        lambda m, x: m.up(x).softmax(1)[:, 0],
        lambda m, x: m.up(x).flip(1)[:, 0],
        lambda m, x: m.up(x).roll(1, 1)[:, 0],
        lambda m, x: (m.up(x) - m.up(x).mean(1, keepdim=True))[:, 0],
        lambda m, x: nn.functional.layer_norm(m.up(x), (5, 16))[:, 0],
        lambda m, x: m.up(x).reshape(3, 16, 5)[:, 0],
        lambda m, x: m.up(x).transpose(1, 2)[:, 0],
        lambda m, x: m.up(x).sort(1).values[:, 0],
        lambda m, x: torch.cat([m.up(x), m.up(x)], 1)[:, 0],
    ],
)
def test_operations_across_positions_are_not_passed(mixes: Any) -> None:
    graph_module = by_export(X, mixes, up=nn.Linear(8, 16))
    check_laws(SinkSelect(), graph_module, X)


def test_result_changed_in_place_is_skipped() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.up(x)
        y.add_(1.0)
        return y[:, 0]

    check_laws(SinkSelect(), by_export(X, body, up=nn.Linear(8, 16)), X, exact=True)


@pytest.mark.slow
def test_input_changed_in_place_later_is_read_before() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        y = m.up(x)
        x.add_(1.0)
        return y[:, 0]

    check_laws(SinkSelect(), by_export(X, body, up=nn.Linear(8, 16)), X)


@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "one row", "causal"])
def test_queries_sink_and_keys_do_not(kind: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v))
        square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = {"boolean": square, "additive": square.to(x.dtype), "one row": square[None, None, -1:]}.get(kind)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=kind == "causal")
        return m.o(mixed.transpose(1, 2).reshape(x.shape))[:, -1]

    graph_module = by_export(X, body, **{name: nn.Linear(8, 8) for name in "qkvo"})
    check_applied(SinkSelect(), graph_module, X)
    changed, _ = run(SinkSelect(), copy_sharing_modules(graph_module))
    assert _rows(changed, "o") == 1
    assert (_rows(changed, "q") == 1) is (kind != "causal")
    assert _rows(changed, "k") != 1
    for length in (2, 9):
        assert_close(
            outputs(changed, X[:1, :1].expand(2, length, 8)), outputs(graph_module, X[:1, :1].expand(2, length, 8)), ""
        )


@pytest.mark.slow
def test_manual_attention() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = (m.q(x) @ m.k(x).transpose(1, 2) / 8**0.5).softmax(-1)
        return m.o(scores @ m.v(x))[:, 0]

    graph_module = by_export(X, body, **{name: nn.Linear(8, 8) for name in "qkvo"})
    check_applied(SinkSelect(), graph_module, X)
    changed, _ = run(SinkSelect(), copy_sharing_modules(graph_module))
    assert [_rows(changed, name) == 1 for name in "qkvo"] == [True, False, False, True]


@pytest.mark.slow
def test_self_attention_with_the_same_tensor_is_skipped() -> None:
    graph_module = by_export(
        X, lambda m, x: nn.functional.scaled_dot_product_attention(y := m.q(x), y, y)[:, 0], q=nn.Linear(8, 8)
    )
    check_laws(SinkSelect(), graph_module, X)


def test_graph_with_unknown_shapes_is_skipped() -> None:
    check_refused(SinkSelect(), by_fx(lambda m, x: m.up(x)[:, 0], up=nn.Linear(8, 16)), X)


@pytest.mark.slow
def test_the_last_layer_of_bert_computes_one_row_for_the_pooler() -> None:
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = randomise(BertModel(config).eval())
    graph_module = symbolic_trace(model, input_names=["input_ids", "attention_mask"])
    both = compose(KeepOutputs(outputs=("pooler_output",)), SinkSelect(), MergeLinears())
    changed = both(copy_sharing_modules(graph_module))
    for size, length in ((1, 2), (4, 11)):
        mask = torch.ones(size, length, dtype=torch.int64)
        mask[-1, length // 2 :] = 0
        original = {"input_ids": torch.randint(0, 60, (size, length)), "attention_mask": mask}
        assert_close(outputs(changed, original), outputs(graph_module, original)[1:], f"{size} x {length}")
    assert _rows(changed, "encoder.layer.1.intermediate.dense") == 1
    assert _rows(changed, "encoder.layer.0.intermediate.dense") != 1


class LastToken(nn.Module):
    """Predicts the next token of texts with padding on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits: torch.Tensor = result.logits
        return logits[:, -1]


@pytest.mark.slow
def test_a_decoder_computes_logits_of_the_last_position_only() -> None:
    model = randomise(LastToken().eval())
    ids = torch.randint(0, 60, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    graph_module = symbolic_trace(model, example_inputs={"input_ids": ids, "attention_mask": mask})
    check_applied(SinkSelect(), graph_module, {"input_ids": ids, "attention_mask": mask})
    changed, _ = run(SinkSelect(), copy_sharing_modules(graph_module))
    assert _rows(changed, "model.lm_head") == 1
    assert _rows(changed, "model.model.layers.1.mlp.down_proj") == 1
    assert _rows(changed, "model.model.layers.1.self_attn.q_proj") == 1
    assert _rows(changed, "model.model.layers.1.self_attn.k_proj") != 1


def test_part_of_a_cat_without_positions_is_not_cut() -> None:
    graph_module = by_export(X, lambda m, x: torch.cat([torch.tensor([]), m.up(x)], -1)[:, 0], up=nn.Linear(8, 4))
    check_refused(SinkSelect(), graph_module, X)
    alike = by_export(X, lambda m, x: torch.cat([x, m.up(x)], -1)[:, 0], up=nn.Linear(8, 4))
    check_applied(SinkSelect(), alike, X)
