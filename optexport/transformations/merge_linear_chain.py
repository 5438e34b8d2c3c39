"""Linears that follow or join each other with nothing between become one: so do low-rank adapters."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import folding, memory, modules
from optexport.transformations.remove_no_ops import handed_through
from optexport.transformations.rule import Match, Rule, Skip


@dataclass(frozen=True)
class Chain(Match):
    """Linears that become one.

    Attributes:
        stays: The call that does the work of all.
        path: The calls of a chain of linears, last first.
        scale: What the result of the chain is multiplied by, where it is added to that of `stays`.
    """

    stays: Node
    path: tuple[Node, ...]
    scale: float


@dataclass(frozen=True)
class MergeLinearChain(Rule):
    """B(A(x))  ->  AB(x)        W(x) + s * B(A(x))  ->  W'(x)

    The second is LoRA (Hu et al., 2021); s may stand on either side, divide, or be missing, and a chain of any length
    may stand for B(A(x)), a single linear too. Dropout outside of training and ``nn.Identity`` may stand between.
    Where linears of one input are to be merged as well, this goes first.

    Skips:   a chain that would be more work as one linear, counted in products for each row; a linear that is shared,
             tied, hooked, parametrized, of a subclass or called more than once, or whose result is used elsewhere too;
             linears that differ in dtype, device or mode, and in a chain in requires_grad; a weight that is not
             contiguous or not of real numbers; an input that is changed in place between them; a product that would
             overflow or become subnormal.
    Exact:   to rounding (weights are multiplied in float64 and rounded once). The weight keeps the requires_grad of W.
    Inverse: none, because the product is rounded, and tells nothing of its factors.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Chain | Skip | None:
        if node.op == "output":  # with an adapter goes a use of its input, which may have kept a chain above apart
            found = (_found(graph_module, other) for other in graph_module.graph.nodes)
            return next((chain for chain in found if isinstance(chain, Chain)), None)
        return _found(graph_module, node)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Chain)
        stays, node, first = match.stays, match.nodes[-1], match.path[-1]
        weight, bias = _product(graph_module, match)
        if stays is node:
            x = modules.sole_input(first)
            assert x is not None
            modules.call_on(stays, x, keyword=bool(stays.kwargs))
        else:
            node.replace_all_uses_with(stays)
        merged = folding.with_weights(_linear(graph_module, stays), weight, bias)
        merged.in_features = weight.shape[1]
        modules.replace_module(graph_module, str(stays.target), merged)
        gone = [call for call in match.path if call is not stays]
        for unused in sorted(match.nodes, reverse=True):
            if unused is not stays and not unused.users:
                graph_module.graph.erase_node(unused)
        for call in gone:
            if call._erased:
                modules.remove_module(graph_module, str(call.target))
        return [(stays, None)]


def _found(graph_module: GraphModule, node: Node) -> Chain | Skip | None:
    if _is_linear(graph_module, node):
        return _followed(graph_module, node)
    if node.target is not operator.add or len(node.args) != 2 or node.kwargs:
        return None
    for base, other in (node.args, node.args[::-1]):
        if isinstance(base, Node) and isinstance(other, Node) and base is not other:
            found = _joined(graph_module, node, base, other)
            if found is not None:
                return found
    return None


def _followed(graph_module: GraphModule, node: Node) -> Chain | Skip | None:
    """A linear of which the input is what another linear gives."""
    between, first = _source(graph_module, modules.sole_input(node))
    if first is None or not _is_linear(graph_module, first):
        return None
    one, two = _linear(graph_module, first), _linear(graph_module, node)
    before = one.in_features * one.out_features + two.in_features * two.out_features
    names = f"{first.target} and {node.target}"
    if one.in_features * two.out_features >= before:
        added = any(user.target in (operator.add, operator.mul) for user in node.users)
        return None if added else Skip(f"{names}: one linear would be more work")
    chain = Chain((first, *reversed(between), node), node, (node, first), 1.0)
    flags = {p.requires_grad for linear in (one, two) for p in linear.parameters()}
    reason = _why_not(graph_module, chain) or ("they differ in requires_grad" if len(flags) > 1 else None)
    return Skip(f"{names}: {reason}") if reason else chain


def _joined(graph_module: GraphModule, sum_: Node, base: Node, other: Node) -> Chain | Skip | None:
    """A linear to which what a chain of others makes of the same input is added."""
    if not _is_linear(graph_module, base):
        return None
    _, x = _source(graph_module, modules.sole_input(base))
    scale, node, path, nodes = 1.0, other, list[Node](), list[Node]()
    while (scaled := _scaled(node)) is not None:
        nodes.append(node)
        factor, node = scaled
        scale *= factor
    while _is_linear(graph_module, node):
        path.append(node)
        between, start = _source(graph_module, modules.sole_input(node))
        nodes += [node, *between]
        if start is None or start is x:
            break
        node = start
    if not path or start is None or start is not x or not math.isfinite(scale):
        return None
    widths = [_linear(graph_module, call).out_features for call in (base, path[0])]
    if widths[0] != widths[1]:
        return None
    chain = Chain((*sorted({base, *nodes}), sum_), base, tuple(path), scale)
    reason = _why_not(graph_module, chain)
    return Skip(f"{base.target} and {path[0].target}: {reason}") if reason else chain


def _why_not(graph_module: GraphModule, chain: Chain) -> str | None:
    calls = sorted({chain.stays, *chain.path})
    linears = [_linear(graph_module, call) for call in calls]
    for call, linear in zip(calls, linears, strict=True):
        if reason := folding.why_not_replaceable(graph_module, call):
            return reason
        if not linear.weight.is_contiguous():
            return f"the weight of {call.target} is not contiguous"
    tensors = [parameter for linear in linears for parameter in linear.parameters()]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1 or len({linear.training for linear in linears}) > 1:
        return "they differ in dtype, device or mode"
    last, x = chain.nodes[-1], modules.sole_input(chain.path[-1])
    for node in chain.nodes[:-1]:
        # What only hands x on before the first linear may be used elsewhere.
        if len(node.users) > 1 and (node in calls or not node < chain.path[-1]):
            return f"the result of {node.name} is used elsewhere too"
    assert x is not None
    if change := memory.changed_between(graph_module, x, min(chain.nodes), last):
        return f"{x.name} is changed in place by {change.name} between them"
    return folding.why_not_held(chain.stays.target, linears[0], *_product(graph_module, chain))


def _product(graph_module: GraphModule, chain: Chain) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of the one linear, in float64."""
    first, *others = (_linear(graph_module, call) for call in reversed(chain.path))
    weight, bias = _double(first.weight), _double(first.bias)
    for linear in others:
        own = _double(linear.weight)
        bias = _sum(None if bias is None else own @ bias, _double(linear.bias))
        weight = own @ weight
    if chain.stays not in chain.path:
        base = _linear(graph_module, chain.stays)
        weight = _double(base.weight) + chain.scale * weight
        bias = _sum(_double(base.bias), None if bias is None else chain.scale * bias)
    return weight, bias


def _double(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().double()


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


def _scaled(node: Node) -> tuple[float, Node] | None:
    """A factor, and what it multiplies."""
    if node.target not in (operator.mul, operator.truediv) or len(node.args) != 2 or node.kwargs:
        return None
    one, other = node.args
    if node.target is operator.mul and isinstance(other, Node):
        one, other = other, one
    if not isinstance(one, Node) or type(other) not in (int, float) or not other:
        return None
    assert isinstance(other, int | float)
    if abs(other) > sys.float_info.max:
        return None
    return (float(other) if node.target is operator.mul else 1 / other), one


def _source(graph_module: GraphModule, node: Node | None) -> tuple[list[Node], Node | None]:
    """What hands a value on unchanged, last first, and where that comes from."""
    between: list[Node] = []
    while node is not None and (found := handed_through(graph_module, node)) is not None:
        between += reversed(found.nodes)
        node = found.source
    return between, node


def _is_linear(graph_module: GraphModule, node: Node) -> bool:
    return isinstance(modules.called_module(graph_module, node), nn.Linear) and modules.sole_input(node) is not None


def _linear(graph_module: GraphModule, call: Node) -> nn.Linear:
    linear = graph_module.get_submodule(str(call.target))
    assert isinstance(linear, nn.Linear)
    return linear
