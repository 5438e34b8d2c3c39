"""Mistakes of a rule that merges or folds weights."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx, nn

from optexport.transformations import FuseBatchNorm, MergeLinears
from tests.faults.catalogue import rule
from tests.faults.graphs import at_layer, bypass, calls, tensor

_MERGED = "query-key-value-merged"
_BERT_MERGED = "encoder.layer.{}.attention.self." + _MERGED
_LLAMA_MERGED = "model.layers.{}.self_attn.q_proj-k_proj-v_proj-merged"
_EMBEDDER = "resnet.embedder.embedder"


def _thirds(graph: fx.GraphModule, linear: str, part: str) -> tuple[torch.Tensor, ...]:
    """Returns queries, keys and values of a merged linear, which may be changed in place."""
    return tensor(graph, f"{linear}.{part}").chunk(3)


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    copied = first.clone()
    first.copy_(second)
    second.copy_(copied)


# --- The weights of a merged linear ---


@rule("block", after=MergeLinears(), third=0)
@rule("block", after=MergeLinears(), third=1)
@rule("block", after=MergeLinears(), third=2)
def one_slice_is_transposed(graph: fx.GraphModule, third: int) -> list[fx.Node]:
    weight = _thirds(graph, _MERGED, "weight")[third]
    weight.copy_(weight.t().clone())
    return calls(graph, _MERGED)


@rule("bert", after=MergeLinears(), layer="first")
@rule("bert", after=MergeLinears(), layer="last")
def keys_and_values_are_swapped(graph: fx.GraphModule, layer: str) -> list[fx.Node]:
    linear = at_layer(graph, _BERT_MERGED, layer)
    _, keys, values = _thirds(graph, linear, "weight")
    _swap(keys, values)
    return calls(graph, linear)


@rule("llama", after=MergeLinears())
def keys_and_values_of_fewer_heads_are_swapped(graph: fx.GraphModule) -> list[fx.Node]:
    """Keys and values have fewer heads than queries, so the three parts differ in size."""
    linear = at_layer(graph, _LLAMA_MERGED, "last")
    _, keys, values = tensor(graph, f"{linear}.weight").split((16, 8, 8))
    _swap(keys, values)
    return calls(graph, linear)


@rule("block", after=MergeLinears())
def queries_and_values_are_cut_out_in_the_wrong_order(graph: fx.GraphModule) -> list[fx.Node]:
    queries, *_, values = sorted(calls(graph, _MERGED)[0].users, key=lambda cut: cut.args[1][1].start)
    queries.args, values.args = values.args, queries.args
    return [queries, values]


@rule("block", after=MergeLinears())
def the_cuts_are_off_by_one(graph: fx.GraphModule) -> list[fx.Node]:
    for part in ("weight", "bias"):
        rows = tensor(graph, f"{_MERGED}.{part}")
        rows.copy_(rows.roll(1, 0))
    return calls(graph, _MERGED)


@rule("block", after=MergeLinears())
def the_last_row_is_forgotten(graph: fx.GraphModule) -> list[fx.Node]:
    tensor(graph, f"{_MERGED}.weight")[-1] = 0
    return calls(graph, _MERGED)


@rule("block", after=MergeLinears())
def the_heads_of_the_values_are_interleaved(graph: fx.GraphModule) -> list[fx.Node]:
    values = _thirds(graph, _MERGED, "weight")[2]
    values.copy_(values.reshape(2, 4, -1).transpose(0, 1).reshape(values.shape).clone())
    return calls(graph, _MERGED)


@rule("llama", after=MergeLinears())
def gate_and_up_are_swapped(graph: fx.GraphModule) -> list[fx.Node]:
    linear = at_layer(graph, "model.layers.{}.mlp.gate_proj-up_proj-merged", "first")
    _swap(*tensor(graph, f"{linear}.weight").chunk(2))
    return calls(graph, linear)


@rule("albert", after=MergeLinears())
def keys_of_a_layer_that_is_called_thrice_are_lost(graph: fx.GraphModule) -> list[fx.Node]:
    (linear,) = [name for name, _ in graph.named_modules() if name.endswith(_MERGED)]
    _thirds(graph, linear, "weight")[1].zero_()
    return calls(graph, linear)


# --- The biases of a merged linear ---


@rule("block", after=MergeLinears())
@rule("block in half", after=MergeLinears())
def biases_are_given_to_the_wrong_third(graph: fx.GraphModule) -> list[fx.Node]:
    bias = tensor(graph, f"{_MERGED}.bias")
    bias.copy_(bias.roll(len(bias) // 3))
    return calls(graph, _MERGED)


@rule("bert", after=MergeLinears(), factor=0, layer="first")
@rule("bert", after=MergeLinears(), factor=2, layer="last")
def the_bias_of_the_values_counts_otherwise(graph: fx.GraphModule, factor: int, layer: str) -> list[fx.Node]:
    """The bias is dropped, or it is added by the linear layer and again after it."""
    linear = at_layer(graph, _BERT_MERGED, layer)
    _thirds(graph, linear, "bias")[2].mul_(factor)
    return calls(graph, linear)


@rule("block", after=MergeLinears())
def the_bias_of_the_queries_is_dropped(graph: fx.GraphModule) -> list[fx.Node]:
    _thirds(graph, _MERGED, "bias")[0].zero_()
    return calls(graph, _MERGED)


@rule("llama", after=MergeLinears())
def biases_that_were_not_there_are_ones_instead_of_zeros(graph: fx.GraphModule) -> list[fx.Node]:
    linear = at_layer(graph, _LLAMA_MERGED, "first")
    merged = graph.get_submodule(linear)
    assert isinstance(merged, nn.Linear)
    assert merged.bias is None
    merged.bias = nn.Parameter(torch.ones(merged.out_features))
    return calls(graph, linear)


@rule("block", factor=0)
@rule("block", factor=2)
@rule("block in half", factor=0)
def the_bias_of_the_last_linear_counts_otherwise(graph: fx.GraphModule, factor: int) -> list[fx.Node]:
    tensor(graph, "down.bias").mul_(factor)
    return calls(graph, "down")


@rule("bert")
def a_bias_goes_to_the_linear_of_the_other_layer(graph: fx.GraphModule) -> list[fx.Node]:
    first, last = (f"encoder.layer.{i}.output.dense" for i in (0, 1))
    _swap(tensor(graph, f"{first}.bias"), tensor(graph, f"{last}.bias"))
    return [*calls(graph, first), *calls(graph, last)]


# --- Scales ---


@rule("block", to=1.0)
@rule("block", to=4.0)
@rule("block", to=0.5)
def the_scale_of_the_scores_is_wrong(graph: fx.GraphModule, to: float) -> fx.Node:
    """The scale is omitted, applied twice, or multiplied instead of divided."""
    (division,) = calls(graph, "truediv")
    division.args = (division.args[0], to)
    return division


@rule("bert")
def scores_are_scaled_by_the_width_of_the_model(graph: fx.GraphModule) -> fx.Node:
    attention = calls(graph, "scaled_dot_product_attention")[0]
    attention.kwargs = {**attention.kwargs, "scale": 16**-0.5}
    return attention


@rule("block", by=2.0)
@rule("block", by=1.0001)
def one_head_is_scaled(graph: fx.GraphModule, by: float) -> list[fx.Node]:
    tensor(graph, "value.weight")[4:] *= by
    return calls(graph, "value")


@rule("block")
def a_scale_is_folded_into_the_weight_but_not_the_bias(graph: fx.GraphModule) -> fx.Node:
    (division,) = calls(graph, "truediv")
    tensor(graph, "query.weight").div_(2.0)
    bypass(division, division.args[0])
    return calls(graph, "query")[0]


# --- Batch norms ---


@rule("resnet", layer="first")
@rule("resnet", layer="last")
def a_batch_norm_takes_the_statistics_of_the_batch(graph: fx.GraphModule, layer: str) -> Iterable[fx.Node]:
    """The module is in training mode."""
    norms = [name for name, module in graph.named_modules() if isinstance(module, nn.BatchNorm2d)]
    name = norms[0 if layer == "first" else -1]
    graph.get_submodule(name).train()
    return calls(graph, name)


@rule("resnet")
def a_batch_norm_is_folded_without_its_eps(graph: fx.GraphModule) -> list[fx.Node]:
    norm = graph.get_submodule(f"{_EMBEDDER}.normalization")
    assert isinstance(norm, nn.BatchNorm2d)
    norm.eps = 0.0
    FuseBatchNorm()(graph)
    return calls(graph, f"{_EMBEDDER}.convolution")


@rule("resnet")
def a_batch_norm_is_folded_without_its_mean(graph: fx.GraphModule) -> list[fx.Node]:
    tensor(graph, f"{_EMBEDDER}.normalization.running_mean").zero_()
    FuseBatchNorm()(graph)
    return calls(graph, f"{_EMBEDDER}.convolution")


@rule("resnet")
def a_batch_norm_is_folded_by_its_variance_instead_of_the_root(graph: fx.GraphModule) -> list[fx.Node]:
    tensor(graph, f"{_EMBEDDER}.normalization.running_var").square_()
    FuseBatchNorm()(graph)
    return calls(graph, f"{_EMBEDDER}.convolution")


@rule("resnet", after=FuseBatchNorm())
def the_bias_of_a_folded_convolution_is_dropped(graph: fx.GraphModule) -> list[fx.Node]:
    tensor(graph, f"{_EMBEDDER}.convolution.bias").zero_()
    return calls(graph, f"{_EMBEDDER}.convolution")


@rule("resnet", after=FuseBatchNorm())
def a_folded_kernel_is_flipped(graph: fx.GraphModule) -> list[fx.Node]:
    """Convolutions in signal processing flip the kernel. Those in neural networks do not."""
    weight = tensor(graph, f"{_EMBEDDER}.convolution.weight")
    weight.copy_(weight.flip(-1, -2))
    return calls(graph, f"{_EMBEDDER}.convolution")


@rule("resnet")
def height_and_width_of_a_kernel_are_swapped(graph: fx.GraphModule) -> list[fx.Node]:
    weight = tensor(graph, f"{_EMBEDDER}.convolution.weight")
    weight.copy_(weight.transpose(-1, -2).clone())
    return calls(graph, f"{_EMBEDDER}.convolution")


@rule("vit")
def channels_of_an_image_are_read_in_the_order_of_another_library(graph: fx.GraphModule) -> list[fx.Node]:
    """The order is blue, green, red."""
    name = "vit.embeddings.patch_embeddings.projection"
    weight = tensor(graph, f"{name}.weight")
    weight.copy_(weight.flip(1))
    return calls(graph, name)


# --- Layer norms ---


@rule("bert", part="bias", value=0.0, layer="first")
@rule("bert", part="bias", value=0.0, layer="last")
@rule("bert", part="weight", value=1.0, layer="last")
def a_layer_norm_loses_its_shift_or_gain(graph: fx.GraphModule, part: str, value: float, layer: str) -> list[fx.Node]:
    norm = at_layer(graph, "encoder.layer.{}.output.LayerNorm", layer)
    tensor(graph, f"{norm}.{part}").fill_(value)
    return calls(graph, norm)


@rule("block", eps=0.0)
@rule("bert", eps=1e-5, name="encoder.layer.1.output.LayerNorm")
def a_layer_norm_has_another_eps(graph: fx.GraphModule, eps: float, name: str = "norm") -> list[fx.Node]:
    """The eps is omitted, or replaced by the default of torch."""
    norm = graph.get_submodule(name)
    assert isinstance(norm, nn.LayerNorm)
    norm.eps = eps
    return calls(graph, name)


@rule("llama")
def the_shift_of_a_folded_norm_counts_twice(graph: fx.GraphModule) -> list[fx.Node]:
    """The gain is folded into the next linear layers, but also stays in the norm."""
    linear = at_layer(graph, "model.layers.{}.mlp.up_proj", "last")
    tensor(graph, f"{linear}.weight").mul_(tensor(graph, "model.layers.1.post_attention_layernorm.weight"))
    return calls(graph, linear)


@rule("llama", value=0.0)
@rule("llama", value=1e-5)
def the_norm_of_a_decoder_has_another_eps(graph: fx.GraphModule, value: float) -> fx.Node:
    last = [node for node in calls(graph, "add") if node.target is operator.add and node.args[1] == 1e-6][-1]
    last.args = (last.args[0], value)
    return last
