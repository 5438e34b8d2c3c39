"""FuseBias: adds a constant to the bias of the linear or convolution before it."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import folding, memory, modules, usage
from optexport.transformations.rule import Match, Rule, Skip

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class FuseBias(Rule):
    """Adds a constant to the bias of the linear or convolution before it.

    Layer(x) + c  ->  Layer'(x) with bias b + c, for a constant number, parameter or buffer c

    Skips:   a c that is not one number per output feature or channel, of another dtype or device, or changed in place;
             a parameter with another requires_grad; a layer whose result has other users; a layer that is shared, tied,
             hooked, parametrized, of a subclass, called more than once or not of real numbers; a bias that would
             overflow.
    Exact:   to rounding (the bias and c are added first).
    Inverse: none, because their sum is rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.target is not operator.add or len(node.args) != 2 or node.kwargs:
            return None
        for call, constant in (node.args, node.args[::-1]):
            layer = modules.called_module(graph_module, call)
            value = _find_value(graph_module, constant)
            if isinstance(layer, _LAYERS) and value is not None:
                assert isinstance(call, Node)
                reason = _find_problem(graph_module, call, layer, value)
                return Skip(reason) if reason else Match((call, node))
        return None

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        call, sum_ = match.nodes
        layer = modules.called_module(graph_module, call)
        assert isinstance(layer, _LAYERS)
        (constant,) = [argument for argument in sum_.args if argument is not call]
        value = _find_value(graph_module, constant)
        assert value is not None
        biased = folding.with_weights(layer, layer.weight, _new_bias(layer, value))
        modules.replace_module(graph_module, str(call.target), biased)
        sum_.replace_all_uses_with(call)
        graph_module.graph.erase_node(sum_)
        if isinstance(constant, Node):
            usage.forget(graph_module, constant)
        return [(call, None)]


def _find_value(graph_module: GraphModule, argument: Any) -> torch.Tensor | None:
    if type(argument) in (int, float) and abs(argument) <= sys.float_info.max:
        return torch.tensor(argument, dtype=torch.float64)
    return memory.find_constant(graph_module, argument)


def _new_bias(layer: Layer, value: torch.Tensor) -> torch.Tensor:
    """Returns the sum of bias and constant, in float64."""
    bias = layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias
    return bias.detach().double() + value.detach().to(bias.device).double().flatten()


def _find_problem(graph_module: GraphModule, call: Node, layer: Layer, value: torch.Tensor) -> str | None:
    target = str(call.target)
    if len(call.users) > 1:
        return f"the result of {target} has other users"
    if reason := folding.find_replacement_problem(graph_module, call):
        return reason
    kind = layer.weight.dtype, layer.weight.device
    promoted = torch.result_type(layer.weight, value) != layer.weight.dtype
    if promoted or value.is_meta or (value.dim() and (value.dtype, value.device) != kind):
        return f"{target} and the constant differ in dtype or device"
    if reason := folding.find_training_problem(layer, [value]):
        return f"{target} and the constant: {reason}"
    # The features are the last axis of a linear's result; in a convolution's, the axes of space follow them.
    shape = (layer.weight.shape[0], *(1 for _ in layer.weight.shape[2:]))
    sizes = zip(value.shape[::-1], shape[::-1], strict=False)
    if value.dim() > len(shape) or any(size not in (1, expected) for size, expected in sizes):
        return f"the constant does not have one number for each of the {shape[0]} features of {target}"
    return folding.find_range_problem(target, layer, layer.weight, _new_bias(layer, value))
