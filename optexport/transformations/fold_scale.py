"""FoldScale: folds a constant factor into a neighboring linear or convolution."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import effects, folding, memory, modules, usage
from optexport.transformations.remove_no_ops import find_local_no_op
from optexport.transformations.rule import Match, Rule, Skip

_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Operations that only move numbers.
_MOVES = ("reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "mT", "view")
_MIN_FACTOR, _MAX_FACTOR = 2**-16, 2**16


@dataclass(frozen=True)
class Fold(Match):
    """A factor before or after layers.

    Attributes:
        x: The value that is multiplied.
        factor: The factor.
        layers: The calls of the layers.
        after: True if the factor comes after the layer, and so multiplies the bias too.
    """

    x: Node
    factor: float
    layers: tuple[Node, ...]
    after: bool


@dataclass(frozen=True)
class FoldScale(Rule):
    """Folds a constant factor into the weights of a neighboring linear or convolution.

    c * Layer(x)  ->  Layer'(x) with weight c * W and bias c * b
    Layer(c * x)  ->  Layer'(x) with weight c * W

    For linears, convolutions and transposed convolutions. The factor or divisor c is a number, or a parameter or buffer
    with one element. Inactive dropouts, and views of the whole value, may lie between. All users of a factor before
    layers must be such layers.

    Skips:   a result with other users; a layer that is shared, tied, hooked, parametrized, of a subclass or called more
             than once; a c outside of 2**-16 to 2**16, because products that cancel might overflow; weights that would
             overflow or become subnormal; a parameter with another requires_grad; an input of unknown or another dtype,
             or that is changed in place before the layer reads it.
    Exact:   bit-exact if c is a positive power of two and no weight or result overflows or is subnormal, else to
             rounding (the weights are scaled in float64 and rounded once).
    Inverse: none, because the weights are rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        if isinstance(modules.called_module(graph_module, node), _LAYERS):
            return self._match_before(graph_module, node)
        if (product := _find_factor(graph_module, node)) is None:
            return None
        x, factor, constant = product
        chain = _sources(graph_module, x)
        if not isinstance(modules.called_module(graph_module, chain[-1]), _LAYERS):
            return None
        reason = _find_problem_after(graph_module, node, chain, constant)
        reason = reason or _find_layer_problem(graph_module, chain[-1], factor, constant, after=True)
        return Skip(reason) if reason else Fold((chain[-1], node), x, factor, (chain[-1],), after=True)

    def _match_before(self, graph_module: GraphModule, last: Node) -> Fold | Skip | None:
        """Matches at the last reader of a factor, so that an earlier factor can match next."""
        read = modules.sole_input(last)
        node = None if read is None else _sources(graph_module, read)[-1]
        product = None if node is None else _find_factor(graph_module, node)
        if node is None or product is None:
            return None
        x, factor, constant = product
        layers, reason = _readers(graph_module, node)
        if max(layers) is not last:
            return None
        reason = reason or _find_problem_before(graph_module, node, x, constant, layers)
        for call in layers:
            reason = reason or _find_layer_problem(graph_module, call, factor, constant, after=False)
        return Skip(reason) if reason else Fold((node, *layers), x, factor, tuple(layers), after=False)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        (node,) = (node for node in match.nodes if node not in match.layers)
        for call in match.layers:
            scaled = _scale(modules.called_module(graph_module, call), match.factor, after=match.after)
            modules.replace_module(graph_module, str(call.target), folding.with_weights(*scaled))
        constants = [source for source in node.all_input_nodes if source is not match.x]
        node.replace_all_uses_with(match.x)
        graph_module.graph.erase_node(node)
        for constant in constants:
            usage.forget(graph_module, constant)
        return [(call, None) for call in match.layers]


def _find_factor(graph_module: GraphModule, node: Node) -> tuple[Node, float, torch.Tensor | None] | None:
    """Returns the factors of a product with a constant, and the constant's tensor or None."""
    if node.target not in (operator.mul, operator.truediv) or len(node.args) != 2 or node.kwargs:
        return None
    for x, factor in (node.args, node.args[::-1])[: 1 if node.target is operator.truediv else 2]:
        constant = memory.find_constant(graph_module, factor)
        if constant is not None and (constant.numel() != 1 or constant.is_complex() or constant.is_meta):
            continue
        number = factor if type(factor) in (int, float) else None if constant is None else constant.item()
        if isinstance(x, Node) and number is not None:
            if node.target is operator.truediv:
                number = 1 / number if number else math.inf  # type: ignore[operator]
            return x, math.inf if abs(number) > sys.float_info.max else float(number), constant  # type: ignore
    return None


def _sources(graph_module: GraphModule, node: Node) -> list[Node]:
    """Returns a node, the value that it is a view of, and so on."""
    chain = [node]
    while _only_moves(graph_module, chain[-1]) and isinstance(source := chain[-1].args[0], Node):
        chain.append(source)
    return chain


def _readers(graph_module: GraphModule, node: Node) -> tuple[list[Node], str | None]:
    """Returns the layers that read a node, also through views, and a problem or None."""
    layers: list[Node] = []
    reason: str | None = None
    ahead = [node]
    while ahead:
        read = ahead.pop()
        for user in read.users:
            if isinstance(modules.called_module(graph_module, user), _LAYERS):
                layers.append(user)
            elif not user.users or not _only_moves(graph_module, user) or user.args[0] is not read:
                reason = reason or f"{read.name} has other users"
            else:
                if modules.operator_name(user) == "view":
                    reason = reason or f"{read.name} is viewed in a shape that requires contiguous memory"
                ahead.append(user)
    return sorted(layers), reason


def _only_moves(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a node returns all numbers of its first argument, in other places."""
    if not node.args or effects.mutated_inputs(graph_module, node):
        return False
    if find_local_no_op(graph_module, node) is not None:
        return True
    module = modules.called_module(graph_module, node)
    if module is not None:
        return isinstance(module, nn.Flatten) and folding.find_plain_problem(module, nn.Flatten) is None
    reads_bits = any(isinstance(argument, torch.dtype) for argument in node.args) or "dtype" in node.kwargs
    return modules.operator_name(node) in _MOVES and not reads_bits


def _find_problem_after(
    graph_module: GraphModule, node: Node, chain: list[Node], constant: torch.Tensor | None
) -> str | None:
    layer: Any = modules.called_module(graph_module, chain[-1])
    for between in chain:
        if len(between.users) > 1:
            return f"the result of {between.target} has other users"
    if constant is not None and constant.dim():
        rank = modules.dims(chain[0])
        if rank is None or constant.dim() > rank or constant.dtype != layer.weight.dtype:
            return f"{node.name} and {chain[0].name} differ in shape or dtype, or these are unknown"
    return None


def _find_problem_before(
    graph_module: GraphModule, node: Node, x: Node, constant: torch.Tensor | None, layers: list[Node]
) -> str | None:
    before, after = x.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return f"the dtype of {x.name} is unknown (trace with example inputs)"
    if before.dtype != after.dtype or (constant is not None and constant.dim() > before.dim()):
        return f"{node.name} and {x.name} differ in shape or dtype"
    if change := memory.find_change_between(graph_module, x, node, max(layers)):
        return f"{x.name} is changed in place by {change.name} before {max(layers).name} reads it"
    return None


def _find_layer_problem(
    graph_module: GraphModule, call: Node, factor: float, constant: torch.Tensor | None, *, after: bool
) -> str | None:
    if reason := folding.find_replacement_problem(graph_module, call):
        return reason
    target, layer = str(call.target), modules.called_module(graph_module, call)
    assert layer is not None
    if not _MIN_FACTOR <= abs(factor) <= _MAX_FACTOR:
        return f"the factor of {target} is {factor}, which is too small or too large"
    if reason := folding.find_training_problem(layer, [constant]):
        return f"{target} and its factor: {reason}"
    return folding.find_range_problem(target, *_scale(layer, factor, after=after))


def _scale(layer: Any, factor: float, *, after: bool) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """Returns a layer and its scaled weight and bias, in float64."""
    weight, bias = layer.weight.detach().double() * factor, layer.bias
    if after and bias is not None:
        bias = bias.detach().double() * factor
    return layer, weight, bias
