"""Mistakes of a rule in layers, precision, embeddings, outputs and sizes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.nn import functional

from tests.faults.catalogue import rule
from tests.faults.graphs import at_layer, bypass, calls, put_behind, tensor

aten = torch.ops.aten

_WORDS = "embeddings.word_embeddings"


# --- Precision ---


@rule("block", name="up", dtype=torch.float16)
@rule("bert", name="encoder.layer.0.attention.self.value", dtype=torch.float16)
@rule("bert", name="encoder.layer.1.output.dense", dtype=torch.bfloat16)
@rule("resnet", name="resnet.embedder.embedder.convolution", dtype=torch.float16)
@rule("minilm", name="encoder.layer.5.output.dense", dtype=torch.float16, nightly=True)
def the_weights_of_one_layer_are_rounded(graph: fx.GraphModule, name: str, dtype: torch.dtype) -> list[fx.Node]:
    weight = tensor(graph, f"{name}.weight")
    weight.copy_(weight.to(dtype))
    return calls(graph, name)


@rule("bert", layer="first")
@rule("bert", layer="last")
def the_results_of_one_layer_are_rounded_to_half(graph: fx.GraphModule, layer: str) -> fx.Node:
    (result,) = calls(graph, at_layer(graph, "encoder.layer.{}.intermediate.dense", layer))
    return put_behind(result, _through, torch.float16)


def _through(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).to(value.dtype)


@rule("bert")
def one_layer_is_quantised_to_eight_bits(graph: fx.GraphModule) -> list[fx.Node]:
    weight = tensor(graph, "encoder.layer.0.output.dense.weight")
    step = weight.abs().max() / 127
    weight.copy_((weight / step).round() * step)
    return calls(graph, "encoder.layer.0.output.dense")


@rule("block", on_linear="up", bit=31)
@rule("block", on_linear="down", bit=30)
@rule("block", on_linear="query", bit=22)
@rule("bert", on_linear="encoder.layer.0.attention.output.dense", bit=22)
@rule("minilm", on_linear="encoder.layer.0.output.dense", bit=30, nightly=True)
def one_bit_of_one_weight_is_flipped(graph: fx.GraphModule, on_linear: str, bit: int) -> list[fx.Node]:
    """Bit 31 is the sign, 30 the highest exponent bit, and 22 the highest mantissa bit."""
    flip_bit(tensor(graph, f"{on_linear}.weight"), bit)
    return calls(graph, on_linear)


def flip_bit(weight: torch.Tensor, bit: int) -> None:
    """Flips a bit of the first number of a float32 tensor."""
    bits = weight.view(torch.int32).reshape(-1)
    bits[0] ^= -(2**31) if bit == 31 else 1 << bit


# --- Layers ---


@rule("bert", layer="first")
@rule("bert", layer="last")
def a_layer_is_dropped(graph: fx.GraphModule, layer: str) -> list[fx.Node]:
    start, middle, end = (
        "embeddings.LayerNorm",
        "encoder.layer.0.output.LayerNorm",
        "encoder.layer.1.output.LayerNorm",
    )
    first, last = (start, middle) if layer == "first" else (middle, end)
    return bypass(calls(graph, last)[0], calls(graph, first)[0])


@rule("block", to="none", approximate="tanh")
@rule("block", to="relu")
@rule("vit", to="none", approximate="tanh")
def gelu_is_another_function(graph: fx.GraphModule, to: str, **options: str) -> fx.Node:
    gelu = calls(graph, "gelu")[-1]
    gelu.kwargs = options
    if to == "relu":
        gelu.target = aten.relu.default
    return gelu


@rule("llama")
def silu_is_gelu(graph: fx.GraphModule) -> fx.Node:
    silu = calls(graph, "silu")[0]
    silu.target = aten.gelu.default
    return silu


@rule("resnet")
def the_last_relu_is_lost(graph: fx.GraphModule) -> list[fx.Node]:
    relu = calls(graph, "relu")[-1]
    return bypass(relu, relu.args[0])


@rule("resnet")
def the_borders_of_a_convolution_are_padded_by_repeating_them(graph: fx.GraphModule) -> list[fx.Node]:
    name = "resnet.embedder.embedder.convolution"
    graph.get_submodule(name).padding_mode = "replicate"
    return calls(graph, name)


@rule("block")
def a_residual_is_lost(graph: fx.GraphModule) -> list[fx.Node]:
    first = calls(graph, "add")[0]
    return bypass(first, first.args[1])


@rule("block")
def a_residual_is_taken_from_before_the_norm(graph: fx.GraphModule) -> fx.Node:
    first, last = calls(graph, "add")
    last.replace_input_with(calls(graph, "norm")[0], first)
    return last


@rule("bert")
def dropout_is_left_on(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "embeddings.LayerNorm")[0], _dropped)


def _dropped(value: torch.Tensor) -> torch.Tensor:
    return functional.dropout(value, 0.1, training=True)


@rule("vit")
def the_image_is_classified_by_its_last_patch(graph: fx.GraphModule) -> fx.Node:
    """The class token before the patches is correct."""
    select = calls(graph, "select")[-1]
    select.args = (*select.args[:2], -1)
    return select


# --- Embeddings ---


@rule("bert", layer="embeddings.position_embeddings")
@rule("bart", layer="decoder.embed_positions", nightly=True)
def positions_are_off_by_one(graph: fx.GraphModule, layer: str) -> list[fx.Node]:
    weight = tensor(graph, f"{layer}.weight")
    weight.copy_(weight.roll(-1, 0))
    return calls(graph, layer)


@rule("bert", traced=6)
def positions_end_at_the_traced_length(graph: fx.GraphModule, traced: int) -> list[fx.Node]:
    weight = tensor(graph, "embeddings.position_embeddings.weight")
    weight[traced:] = weight[traced - 1]
    return calls(graph, "embeddings.position_embeddings")


@rule("vit")
def the_positions_of_patches_start_with_the_class_token(graph: fx.GraphModule) -> list[fx.Node]:
    positions = tensor(graph, "vit.embeddings.position_embeddings")
    positions.copy_(positions.roll(-1, 1))
    return graph.graph.find_nodes(op="get_attr", target="vit.embeddings.position_embeddings")


@rule("bert")
def the_second_sentence_is_taken_for_the_first(graph: fx.GraphModule) -> list[fx.Node]:
    weight = tensor(graph, "embeddings.token_type_embeddings.weight")
    weight[1] = weight[0]
    return calls(graph, "embeddings.token_type_embeddings")


_RARE = "a token id that no check input holds"


@rule("bert", token="in the text")
@rule("bert", token="first")
@rule("bert", token="last")
@rule("bert", token="rare", missed=_RARE)
@rule("minilm", token="in the text", nightly=True)
@rule("minilm", token="last", nightly=True)
def two_rows_of_an_embedding_are_swapped(graph: fx.GraphModule, token: str) -> list[fx.Node]:
    """An export that adds or drops a token is off by one at an end of the vocabulary."""
    weight = tensor(graph, f"{_WORDS}.weight")
    traced = _traced_ids(graph)
    rare = sorted(set(range(4, len(weight) - 2)) - traced)
    first, second = {
        "in the text": (min(traced), rare[0]),
        "first": (0, 1),
        "last": (len(weight) - 1, len(weight) - 2),
        "rare": (rare[0], rare[1]),
    }[token]
    weight[[first, second]] = weight[[second, first]]
    return calls(graph, _WORDS)


def _traced_ids(graph: fx.GraphModule) -> set[int]:
    from tests.faults.subjects import subject

    name = "bert" if len(tensor(graph, f"{_WORDS}.weight")) == 60 else "minilm"
    return set(subject(name).inputs["input_ids"].flatten().tolist())


# --- Outputs ---


@rule("block")
def an_output_is_of_another_dtype(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "add")[-1], torch.Tensor.double)


@rule("block")
def an_integer_output_is_narrower(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "argmax")[-1], torch.Tensor.int)


@rule("block")
def an_index_is_off_by_one(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "argmax")[-1], torch.add, 1)


@rule("block")
def of_equal_values_the_last_is_chosen(graph: fx.GraphModule) -> fx.Node:
    argmax = calls(graph, "argmax")[-1]
    argmax.target = _last_argmax
    return argmax


def _last_argmax(values: torch.Tensor) -> torch.Tensor:
    return values.numel() - 1 - values.flip(0).argmax()


@rule("bart", nightly=True)
@rule("block")
def two_outputs_are_swapped(graph: fx.GraphModule) -> Iterable[fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    returned = output.args[0]
    first, second = returned.values() if isinstance(returned, dict) else returned
    output.args = (
        type(returned)(zip(returned, (second, first), strict=True)) if isinstance(returned, dict) else (second, first),
    )
    return [first, second]


# --- Sizes ---


@rule("block", size="batch")
@rule("block", size="sequence")
@rule("bert", size="batch")
@rule("bert", size="sequence")
def a_size_is_baked_in(graph: fx.GraphModule, size: str) -> Iterable[fx.Node]:
    axis = ("batch", "sequence").index(size)
    sizes = [node for node in calls(graph, "sym_size") if node.args[1] == axis]
    changed = []
    for node in sizes:
        for user in list(node.users):
            if user.target in (aten.view.default, aten.reshape.default):
                user.replace_input_with(node, int(node.meta["val"].node.hint))
                changed.append(user)
    return changed


@rule("block")
def a_batch_of_one_loses_its_axis(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "add")[-1], torch.squeeze, 0)


@rule("block")
def every_batch_is_computed_with_its_first_row(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "value")[0], _first_row)


def _first_row(value: torch.Tensor) -> torch.Tensor:
    return value[:1].expand_as(value)


@rule("block", missed="no check input is so large")
def large_values_are_clipped_to_the_range_of_half(graph: fx.GraphModule) -> fx.Node:
    (x,) = [node for node in graph.graph.nodes if node.op == "placeholder" and node.target == "x"]
    return put_behind(x, torch.clamp, -65504.0, 65504.0)
