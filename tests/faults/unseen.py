"""Changes that the parity checks cannot see: no effect, or smaller than rounding.

All are registered as mistakes of a rule. Changes of the first kind give the same results in exact arithmetic. Changes
of the second kind have a size, as a fraction of the noise floor.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from optexport.signature.signature import Batch
from optexport.transformations import MergeLinears
from tests.faults.catalogue import AnyMistake, Fault, enter
from tests.faults.graphs import at_layer, calls, put_behind, tensor
from tests.faults.layers import flip_bit

aten = torch.ops.aten

CANNOT_SHOW: dict[str, Fault] = {}
BELOW_THE_FLOOR: dict[str, LostInRounding] = {}


@dataclass(frozen=True)
class LostInRounding:
    """A fault that is smaller than the rounding errors of the original model.

    Attributes:
        size: The largest change in float64 over all outputs and check inputs, in noise floors.
    """

    fault: Fault
    size: float


def cannot_show(on: str, **options: object) -> Callable[[AnyMistake], AnyMistake]:
    """Registers a change that has no effect in exact arithmetic."""
    after = options.pop("after", None)
    return lambda change: enter(change, on, options, CANNOT_SHOW, after=after)


def lost(on: str, size: float, **options: object) -> Callable[[AnyMistake], AnyMistake]:
    """Registers a change that is smaller than rounding errors."""

    def enter_both(change: AnyMistake) -> AnyMistake:
        shelf: dict[str, Fault] = {}
        enter(change, on, options, shelf)
        for name, fault in shelf.items():
            BELOW_THE_FLOOR[name] = LostInRounding(fault, size)
        return change

    return enter_both


def in_float64(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph in float64, also for operators with an explicit dtype."""
    graph = copy.deepcopy(graph).double()
    for node in list(graph.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
        else:
            node.args, node.kwargs = pytree.tree_map(_wider, (node.args, node.kwargs))
    graph.recompile()
    return graph


def _wider(value: object) -> object:
    return torch.float64 if value in (torch.float32, torch.float16) else value


def double(batch: Batch) -> Batch:
    """Returns a batch in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


# --- Changes without an effect ---


@cannot_show("block", after=MergeLinears())
def the_bias_of_the_keys_is_dropped(graph: fx.GraphModule) -> list[fx.Node]:
    """The bias adds the same number to all scores of a query, and the softmax removes it."""
    tensor(graph, "query-key-value-merged.bias").chunk(3)[1].zero_()
    return calls(graph, "query-key-value-merged")


@cannot_show("bert", layer="first")
@cannot_show("bert", layer="last")
def the_bias_of_the_keys_is_doubled(graph: fx.GraphModule, layer: str) -> list[fx.Node]:
    keys = at_layer(graph, "encoder.layer.{}.attention.self.key", layer)
    tensor(graph, f"{keys}.bias").mul_(2)
    return calls(graph, keys)


@cannot_show("block")
def all_scores_are_shifted(graph: fx.GraphModule) -> fx.Node:
    return put_behind(calls(graph, "truediv")[0], torch.add, 3.0)


@cannot_show("block")
def queries_are_doubled_and_keys_halved(graph: fx.GraphModule) -> list[fx.Node]:
    for name, factor in (("query", 2.0), ("key", 0.5)):
        for part in ("weight", "bias"):
            tensor(graph, f"{name}.{part}").mul_(factor)
    return calls(graph, "query")


@cannot_show("block")
def heads_change_places(graph: fx.GraphModule) -> list[fx.Node]:
    """The heads move in queries, keys, values and the linear layer that reads them."""
    for name in ("query", "key", "value"):
        for part in ("weight", "bias"):
            rows = tensor(graph, f"{name}.{part}")
            rows.copy_(rows.roll(4, 0))
    columns = tensor(graph, "out.weight")
    columns.copy_(columns.roll(4, 1))
    return calls(graph, "out")


@cannot_show("bert")
def hidden_units_change_places(graph: fx.GraphModule) -> list[fx.Node]:
    for name in ("intermediate.dense.weight", "intermediate.dense.bias"):
        rows = tensor(graph, f"encoder.layer.0.{name}")
        rows.copy_(rows.flip(0))
    columns = tensor(graph, "encoder.layer.0.output.dense.weight")
    columns.copy_(columns.flip(1))
    return calls(graph, "encoder.layer.0.output.dense")


@cannot_show("block")
def masked_scores_are_farther_away(graph: fx.GraphModule) -> fx.Node:
    """exp(-1e4) and exp(-1e9) are both 0."""
    (masked,) = calls(graph, "masked_fill")
    masked.args = (*masked.args[:2], -1e9)
    return masked


@cannot_show("block")
def all_features_are_shifted_before_a_layer_norm(graph: fx.GraphModule) -> list[fx.Node]:
    """A layer norm subtracts the mean."""
    tensor(graph, "out.bias").add_(0.5)
    return calls(graph, "out")


@cannot_show("bert")
def a_token_type_and_the_positions_share_otherwise(graph: fx.GraphModule) -> list[fx.Node]:
    """Their sum is the same."""
    tensor(graph, "embeddings.token_type_embeddings.weight").add_(0.25)
    tensor(graph, "embeddings.position_embeddings.weight").sub_(0.25)
    return calls(graph, "embeddings.position_embeddings")


@cannot_show("resnet")
def a_batch_norm_has_another_mean_and_shift(graph: fx.GraphModule) -> list[fx.Node]:
    """The bias of a convolution is folded into the mean instead of the shift."""
    name = "resnet.embedder.embedder.normalization"
    norm = graph.get_submodule(name)
    assert isinstance(norm, nn.BatchNorm2d)
    scale = tensor(graph, f"{name}.weight") * (tensor(graph, f"{name}.running_var") + norm.eps).rsqrt()
    tensor(graph, f"{name}.running_mean").add_(0.5)
    tensor(graph, f"{name}.bias").add_(0.5 * scale)
    return calls(graph, name)


@cannot_show("llama")
def all_positions_of_a_decoder_are_off_by_one(graph: fx.GraphModule) -> fx.Node:
    """Rotary embeddings depend only on the distance between two tokens."""
    return put_behind(calls(graph, "arange")[0], torch.add, 1)


# --- Changes that are lost in rounding ---


@lost("block", 0.0036, linear="up", bit=0)
@lost("block", 0.058, linear="up", bit=4)
@lost("block", 1.8, linear="up", bit=9)
@lost("bert", 0.012, linear="encoder.layer.1.output.dense", bit=0)
def a_low_bit_of_one_weight_is_flipped(graph: fx.GraphModule, linear: str, bit: int) -> list[fx.Node]:
    flip_bit(tensor(graph, f"{linear}.weight"), bit)
    return calls(graph, linear)


@lost("block in half", 0.0036)
def a_low_bit_of_one_weight_in_half_is_flipped(graph: fx.GraphModule) -> list[fx.Node]:
    tensor(graph, "up.weight").view(torch.int16)[0, 0] ^= 1
    return calls(graph, "up")


@lost("block in half", 0.071)
def gelu_in_half_is_its_approximation(graph: fx.GraphModule) -> fx.Node:
    (gelu,) = calls(graph, "gelu")
    gelu.kwargs = {"approximate": "tanh"}
    return gelu


@lost("block in half", 0.0056, eps=0.0)
@lost("bert", 1.9e-6, eps=0.0, name="encoder.layer.1.output.LayerNorm")
def a_layer_norm_has_no_eps(graph: fx.GraphModule, eps: float, name: str = "norm") -> list[fx.Node]:
    """The eps of the second model is 1e-12, which is below one ulp of the variance."""
    norm = graph.get_submodule(name)
    assert isinstance(norm, nn.LayerNorm)
    norm.eps = eps
    return calls(graph, name)


@lost("bert", 0.048)
def the_scale_of_the_scores_is_rounded_to_seven_digits(graph: fx.GraphModule) -> fx.Node:
    attention = calls(graph, "scaled_dot_product_attention")[0]
    attention.kwargs = {**attention.kwargs, "scale": 0.3535534}
    return attention


@lost("llama", 0.48, value=1.1e-6)
def the_eps_of_a_norm_is_a_tenth_larger(graph: fx.GraphModule, value: float) -> fx.Node:
    last = [node for node in calls(graph, "add") if node.target is operator.add and node.args[1] == 1e-6][-1]
    last.args = (last.args[0], value)
    return last


@lost("vit", 0.12)
def a_ten_millionth_is_added_to_one_head(graph: fx.GraphModule) -> list[fx.Node]:
    tensor(graph, "vit.layers.0.attention.v_proj.bias")[:8] += 1e-7
    return calls(graph, "vit.layers.0.attention.v_proj")
