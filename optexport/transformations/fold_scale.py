"""A constant factor becomes part of the linear or the convolution before or after it."""

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
from optexport.transformations.remove_no_ops import handed_through
from optexport.transformations.rule import Match, Rule, Skip

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# What puts all numbers elsewhere, or leaves them.
_MOVES = ("reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "mT", "view")


@dataclass(frozen=True)
class Fold(Match):
    """A factor beside layers.

    Attributes:
        x: What is multiplied.
        factor: By what.
        layers: The calls of the layers.
        after: Whether the factor comes after the layer, and so is one of its bias too.
    """

    x: Node
    factor: float
    layers: tuple[Node, ...]
    after: bool


@dataclass(frozen=True)
class FoldScale(Rule):
    """Layer(x) * c  ->  Layer'(x)        Layer(x * c)  ->  Layer'(x)

    For linears, convolutions and transposed convolutions, and a constant factor or divisor c: a number, parameter or
    buffer of one element. Views of the whole, and a dropout outside of training, may stand between. Of a factor before
    layers all its users have to be such layers.

    Skips:   a result that is used elsewhere too; a layer that is shared, tied, hooked, parametrized, of a subclass or
             called more than once; a c that is not between 2**-16 and 2**16, as products that cancel might then
             overflow, or with which the weights would overflow or become subnormal, or that is a parameter of another
             requires_grad; an input of unknown or another dtype, or that is changed in place before the layer reads it.
    Exact:   to the bit where c is a positive power of two and neither weights nor results overflow or are subnormal;
             else to rounding (the weights are scaled in float64 and rounded once).
    Inverse: none, because the weights are rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        if isinstance(modules.called_module(graph_module, node), _LAYERS):
            return self._before(graph_module, node)
        if (found := _factor(graph_module, node)) is None:
            return None
        x, factor, held = found
        chain = _up(graph_module, x)
        if not isinstance(modules.called_module(graph_module, chain[-1]), _LAYERS):
            return None
        reason = _why_not_after(graph_module, node, chain, held)
        reason = reason or _why_not_scaled(graph_module, chain[-1], factor, held, after=True)
        return Skip(reason) if reason else Fold((chain[-1], node), x, factor, (chain[-1],), after=True)

    def _before(self, graph_module: GraphModule, last: Node) -> Fold | Skip | None:
        """The factor before a layer, found at the last that reads it: what stands before that factor comes next."""
        read = modules.sole_input(last)
        node = None if read is None else _up(graph_module, read)[-1]
        found = None if node is None else _factor(graph_module, node)
        if node is None or found is None:
            return None
        x, factor, held = found
        layers, reason = _down(graph_module, node)
        if max(layers) is not last:
            return None
        reason = reason or _why_not_before(graph_module, node, x, held, layers)
        for call in layers:
            reason = reason or _why_not_scaled(graph_module, call, factor, held, after=False)
        return Skip(reason) if reason else Fold((node, *layers), x, factor, tuple(layers), after=False)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        (node,) = (node for node in match.nodes if node not in match.layers)
        for call in match.layers:
            scaled = _scaled(modules.called_module(graph_module, call), match.factor, after=match.after)
            modules.replace_module(graph_module, str(call.target), folding.with_weights(*scaled))
        constants = [source for source in node.all_input_nodes if source is not match.x]
        node.replace_all_uses_with(match.x)
        graph_module.graph.erase_node(node)
        for constant in constants:
            usage.forget(graph_module, constant)
        return [(call, None) for call in match.layers]


def _factor(graph_module: GraphModule, node: Node) -> tuple[Node, float, torch.Tensor | None] | None:
    """What a node multiplies, by which constant number, and the tensor that holds that, if one does."""
    if node.target not in (operator.mul, operator.truediv) or len(node.args) != 2 or node.kwargs:
        return None
    for x, other in (node.args, node.args[::-1])[: 1 if node.target is operator.truediv else 2]:
        held = memory.constant(graph_module, other)
        if held is not None and (held.numel() != 1 or held.is_complex() or held.is_meta):
            continue
        number = other if type(other) in (int, float) else None if held is None else held.item()
        if isinstance(x, Node) and number is not None:
            if node.target is operator.truediv:
                number = 1 / number if number else math.inf  # type: ignore[operator]
            return x, math.inf if abs(number) > sys.float_info.max else float(number), held  # type: ignore
    return None


def _up(graph_module: GraphModule, node: Node) -> list[Node]:
    """A node, and what it is a view of the whole of, and so on."""
    chain = [node]
    while _moves(graph_module, chain[-1]) and isinstance(source := chain[-1].args[0], Node):
        chain.append(source)
    return chain


def _down(graph_module: GraphModule, node: Node) -> tuple[list[Node], str | None]:
    """The layers that read a node, through views or not, and why they cannot have it multiplied for them."""
    layers: list[Node] = []
    reason: str | None = None
    ahead = [node]
    while ahead:
        read = ahead.pop()
        for user in read.users:
            if isinstance(modules.called_module(graph_module, user), _LAYERS):
                layers.append(user)
            elif not user.users or not _moves(graph_module, user) or user.args[0] is not read:
                reason = reason or f"{read.name} is used elsewhere too"
            else:
                if modules.operator_name(user) == "view":
                    reason = reason or f"{read.name} is viewed in a shape that only contiguous memory can take"
                ahead.append(user)
    return sorted(layers), reason


def _moves(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node only puts the numbers of its first argument elsewhere."""
    if not node.args or effects.mutated(graph_module, node):
        return False
    if handed_through(graph_module, node) is not None:
        return True
    module = modules.called_module(graph_module, node)
    if module is not None:
        return isinstance(module, nn.Flatten) and folding.why_not_plain(module, nn.Flatten) is None
    reads_bits = any(isinstance(argument, torch.dtype) for argument in node.args) or "dtype" in node.kwargs
    return modules.operator_name(node) in _MOVES and not reads_bits


def _why_not_after(graph_module: GraphModule, node: Node, chain: list[Node], held: torch.Tensor | None) -> str | None:
    layer: Any = modules.called_module(graph_module, chain[-1])
    for between in chain:
        if len(between.users) > 1:
            return f"the result of {between.target} is used elsewhere too"
    if held is not None and held.dim():
        rank = modules.dims(chain[0])
        if rank is None or held.dim() > rank or held.dtype != layer.weight.dtype:
            return f"{node.name} has another shape or dtype than {chain[0].name}, or it is not known"
    return None


def _why_not_before(
    graph_module: GraphModule, node: Node, x: Node, held: torch.Tensor | None, layers: list[Node]
) -> str | None:
    before, after = x.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return f"the dtype of {x.name} is not known: trace with example inputs"
    if before.dtype != after.dtype or (held is not None and held.dim() > before.dim()):
        return f"{node.name} has another shape or dtype than {x.name}"
    if change := memory.changed_between(graph_module, x, node, max(layers)):
        return f"{x.name} is changed in place by {change.name} before {max(layers).name} reads it"
    return None


def _why_not_scaled(
    graph_module: GraphModule, call: Node, factor: float, held: torch.Tensor | None, *, after: bool
) -> str | None:
    if reason := folding.why_not_replaceable(graph_module, call):
        return reason
    target, layer = str(call.target), modules.called_module(graph_module, call)
    assert layer is not None
    if not 2**-16 <= abs(factor) <= 2**16:
        return f"the factor beside {target} is {factor}"
    if reason := folding.why_not_trained_alike(layer, [held]):
        return f"{target} and the factor beside it: {reason}"
    return folding.why_not_held(target, *_scaled(layer, factor, after=after))


def _scaled(layer: Any, factor: float, *, after: bool) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """A layer, and its parameters multiplied in float64, as far as the factor reaches them."""
    weight, bias = layer.weight.detach().double() * factor, layer.bias
    if after and bias is not None:
        bias = bias.detach().double() * factor
    return layer, weight, bias
