"""Mistakes of a rule in attention: masks, softmax, heads and positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tests.faults.catalogue import rule
from tests.faults.graphs import bypass, calls, put_behind

aten = torch.ops.aten


def _attention(graph: fx.GraphModule, index: int) -> fx.Node:
    return calls(graph, "scaled_dot_product_attention")[index]


def _with(attention: fx.Node, position: int, operand: Any) -> fx.Node:
    attention.args = (*attention.args[:position], operand, *attention.args[position + 1 :])
    return attention


# --- Masks ---


@rule("block")
def the_mask_is_inverted(graph: fx.GraphModule) -> fx.Node:
    (where,) = calls(graph, "eq")
    where.target = aten.ne.Scalar
    return where


@rule("block")
def the_mask_is_ignored(graph: fx.GraphModule) -> list[fx.Node]:
    (masked,) = calls(graph, "masked_fill")
    return bypass(masked, masked.args[0])


@rule("bert", layer=0)
@rule("bert", layer=-1)
@rule("llama", layer=-1)
def one_layer_ignores_the_mask(graph: fx.GraphModule, layer: int) -> fx.Node:
    return _with(_attention(graph, layer), 3, None)


@rule("block", traced=5)
@rule("bert", traced=6)
def the_mask_is_ignored_past_the_traced_length(graph: fx.GraphModule, traced: int) -> fx.Node:
    (mask,) = [n for n in graph.graph.nodes if n.op == "placeholder" and "mask" in n.target]
    return put_behind(mask, _seen_past, traced)


def _seen_past(mask: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([mask[:, :length], torch.ones_like(mask[:, length:])], 1)


@rule("block")
@rule("bert")
def the_mask_of_the_first_row_is_used_for_all(graph: fx.GraphModule) -> fx.Node:
    (mask,) = [n for n in graph.graph.nodes if n.op == "placeholder" and "mask" in n.target]
    return put_behind(mask, _first_row)


def _first_row(mask: torch.Tensor) -> torch.Tensor:
    return mask[:1].expand_as(mask)


@rule("block", value=-10.0)
@rule("block", value=float("-inf"))
def masked_scores_are_filled_with_another_number(graph: fx.GraphModule, value: float) -> fx.Node:
    """A value that is too small, or -inf, which gives NaN for rows that contain only padding."""
    (masked,) = calls(graph, "masked_fill")
    masked.args = (*masked.args[:2], value)
    return masked


@rule("bert")
def a_row_of_padding_alone_is_not_a_number(graph: fx.GraphModule) -> fx.Node:
    """A softmax over no elements gives NaN, and torch gives zero."""
    attention = _attention(graph, 0)
    return put_behind(attention, _nan_of_nothing, attention.args[3])


def _nan_of_nothing(mixed: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mixed.masked_fill(~mask.any(-1, keepdim=True), torch.nan)


@rule("llama")
@rule("bart", nightly=True)
def a_decoder_sees_the_next_token(graph: fx.GraphModule) -> fx.Node:
    causal = next(node for node in graph.graph.nodes if "aten.le." in str(node.target))
    return put_behind(causal, _one_more)


def _one_more(mask: torch.Tensor) -> torch.Tensor:
    return mask | mask.roll(1, -1)


@rule("llama", layer=0)
@rule("bart", layer=1, nightly=True)
def one_layer_of_a_decoder_sees_the_future(graph: fx.GraphModule, layer: int) -> fx.Node:
    attention = _attention(graph, layer)
    return put_behind(attention.args[3], torch.ones_like) if layer else _with(attention, 3, None)


@rule("bart", nightly=True)
def a_decoder_reads_the_padding_of_the_encoder(graph: fx.GraphModule) -> fx.Node:
    return _with(_attention(graph, 2), 3, None)


# --- Softmax and heads ---


@rule("block", axis=-2)
@rule("block", axis=1)
def the_softmax_is_over_the_wrong_axis(graph: fx.GraphModule, axis: int) -> fx.Node:
    (softmax,) = calls(graph, "softmax")
    softmax.args = (softmax.args[0], axis)
    return softmax


@rule("block")
def heads_are_joined_without_being_transposed_back(graph: fx.GraphModule) -> Iterable[fx.Node]:
    last = calls(graph, "transpose")[-1]
    return bypass(last, last.args[0])


@rule("bert")
def values_are_read_as_keys(graph: fx.GraphModule) -> fx.Node:
    attention = _attention(graph, -1)
    return _with(attention, 1, attention.args[2])


@rule("bart", nightly=True)
def a_decoder_attends_to_itself_instead_of_the_encoder(graph: fx.GraphModule) -> list[fx.Node]:
    linears = [calls(graph, f"decoder.layers.0.encoder_attn.{name}_proj")[0] for name in ("q", "v")]
    query, value = linears
    value.args = query.args
    (key,) = calls(graph, "decoder.layers.0.encoder_attn.k_proj")
    key.args = query.args
    return [key, value]


@rule("llama")
def key_heads_are_repeated_in_the_wrong_order(graph: fx.GraphModule) -> fx.Node:
    """The order is 0 1 0 1 instead of 0 0 1 1."""
    repeated = _attention(graph, 0).args[1]
    assert isinstance(repeated, fx.Node)
    return put_behind(repeated, _interleaved)


def _interleaved(heads: torch.Tensor) -> torch.Tensor:
    return heads.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)


# --- Positions of a decoder ---


@rule("llama")
def a_rotation_turns_the_other_way(graph: fx.GraphModule) -> list[fx.Node]:
    negative = calls(graph, "neg")[0]
    return bypass(negative, negative.args[0])


@rule("llama")
def queries_are_rotated_from_another_position_than_keys(graph: fx.GraphModule) -> fx.Node:
    (turned,) = calls(graph, "neg")[0].users
    return put_behind(turned, torch.roll, 1, 2)


@rule("llama", traced=6)
def positions_of_a_decoder_end_at_the_traced_length(graph: fx.GraphModule, traced: int) -> fx.Node:
    return put_behind(calls(graph, "arange")[0], torch.clamp, None, traced - 1)
