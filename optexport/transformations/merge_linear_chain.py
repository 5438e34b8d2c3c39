"""MergeLinearChain: linears in a row, and low-rank adapters, become one linear."""

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
from optexport.transformations.remove_no_ops import find_local_no_op
from optexport.transformations.rule import Match, Rule, Skip


@dataclass(frozen=True)
class Chain(Match):
    """Linears that become one.

    Attributes:
        stays: The call of the linear that replaces all.
        path: The calls of the linears in a row, last first.
        scale: Factor of the result of `path`, if it is added to the result of `stays`.
    """

    stays: Node
    path: tuple[Node, ...]
    scale: float


@dataclass(frozen=True)
class MergeLinearChain(Rule):
    """Merges linears in a row, and low-rank adapters with their linear.

    B(A(x))  ->  AB(x)        W(x) + s * B(A(x))  ->  W'(x)

    The second is LoRA (Hu et al., 2021). The factor s may be on either side, be a divisor, or be missing. B(A(x)) may
    be any number of linears in a row, also one. Inactive dropouts and ``nn.Identity`` may lie between. Apply this rule
    before `MergeLinears`.

    Skips:   linears that need more multiplications per row as one; a linear that is shared, tied, hooked, parametrized,
             of a subclass or called more than once, or whose result has other users; linears that differ in dtype,
             device or mode, or in requires_grad if they are in a row; a weight that is not contiguous or not of real
             numbers; an input that is changed in place between them; weights that would overflow or become subnormal.
    Exact:   to rounding (weights are multiplied in float64 and rounded once). The weight keeps the requires_grad of W.
    Inverse: none, because the product of the weights does not determine the factors.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Chain | Skip | None:
        if node.op == "output":
            # Merging an adapter removes a user of its input, so a chain before it may match now.
            results = (_find_chain(graph_module, n) for n in graph_module.graph.nodes)
            return next((result for result in results if isinstance(result, Chain)), None)
        return _find_chain(graph_module, node)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Chain)
        stays, node, first = match.stays, match.nodes[-1], match.path[-1]
        weight, bias = _merged_weights(graph_module, match)
        if stays is node:
            x = modules.sole_input(first)
            assert x is not None
            modules.call_on(stays, x, keyword=bool(stays.kwargs))
        else:
            node.replace_all_uses_with(stays)
        merged = folding.with_weights(_linear(graph_module, stays), weight, bias)
        merged.in_features = weight.shape[1]
        modules.replace_module(graph_module, str(stays.target), merged)
        for unused in sorted(match.nodes, reverse=True):
            if unused is not stays and not unused.users:
                graph_module.graph.erase_node(unused)
        for call in match.path:
            if call is not stays and call._erased:
                modules.remove_module(graph_module, str(call.target))
        return [(stays, None)]


def _find_chain(graph_module: GraphModule, node: Node) -> Chain | Skip | None:
    if _is_linear(graph_module, node):
        return _find_sequence(graph_module, node)
    if node.target is not operator.add or len(node.args) != 2 or node.kwargs:
        return None
    for base, adapter in (node.args, node.args[::-1]):
        if isinstance(base, Node) and isinstance(adapter, Node) and base is not adapter:
            result = _find_adapter(graph_module, node, base, adapter)
            if result is not None:
                return result
    return None


def _find_sequence(graph_module: GraphModule, node: Node) -> Chain | Skip | None:
    """Matches a linear that reads the result of another."""
    between, first = _find_source(graph_module, modules.sole_input(node))
    if first is None or not _is_linear(graph_module, first):
        return None
    one, two = _linear(graph_module, first), _linear(graph_module, node)
    cost = one.in_features * one.out_features + two.in_features * two.out_features
    names = f"{first.target} and {node.target}"
    if one.in_features * two.out_features >= cost:
        is_adapter = any(user.target in (operator.add, operator.mul) for user in node.users)
        return None if is_adapter else Skip(f"{names}: one linear would need more multiplications")
    chain = Chain((first, *reversed(between), node), node, (node, first), 1.0)
    flags = {p.requires_grad for linear in (one, two) for p in linear.parameters()}
    reason = _find_problem(graph_module, chain) or ("the linears differ in requires_grad" if len(flags) > 1 else None)
    return Skip(f"{names}: {reason}") if reason else chain


def _find_adapter(graph_module: GraphModule, sum_: Node, base: Node, adapter: Node) -> Chain | Skip | None:
    """Matches a sum of a linear and of other linears in a row, with the same input."""
    if not _is_linear(graph_module, base):
        return None
    _, x = _find_source(graph_module, modules.sole_input(base))
    scale, node, path, nodes = 1.0, adapter, list[Node](), list[Node]()
    while (scaled := _find_scale(node)) is not None:
        nodes.append(node)
        factor, node = scaled
        scale *= factor
    while _is_linear(graph_module, node):
        path.append(node)
        between, start = _find_source(graph_module, modules.sole_input(node))
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
    reason = _find_problem(graph_module, chain)
    return Skip(f"{base.target} and {path[0].target}: {reason}") if reason else chain


def _find_problem(graph_module: GraphModule, chain: Chain) -> str | None:
    calls = sorted({chain.stays, *chain.path})
    linears = [_linear(graph_module, call) for call in calls]
    for call, linear in zip(calls, linears, strict=True):
        if reason := folding.find_replacement_problem(graph_module, call):
            return reason
        if not linear.weight.is_contiguous():
            return f"the weight of {call.target} is not contiguous"
    tensors = [parameter for linear in linears for parameter in linear.parameters()]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1 or len({linear.training for linear in linears}) > 1:
        return "the linears differ in dtype, device or mode"
    last, x = chain.nodes[-1], modules.sole_input(chain.path[-1])
    for node in chain.nodes[:-1]:
        # A no-op before the first linear may have other users.
        if len(node.users) > 1 and (node in calls or not node < chain.path[-1]):
            return f"the result of {node.name} has other users"
    assert x is not None
    if change := memory.find_change_between(graph_module, x, min(chain.nodes), last):
        return f"{x.name} is changed in place by {change.name} between the linears"
    return folding.find_range_problem(chain.stays.target, linears[0], *_merged_weights(graph_module, chain))


def _merged_weights(graph_module: GraphModule, chain: Chain) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of the merged linear, in float64."""
    first, *rest = (_linear(graph_module, call) for call in reversed(chain.path))
    weight, bias = _double(first.weight), _double(first.bias)
    for linear in rest:
        factor = _double(linear.weight)
        bias = _add(None if bias is None else factor @ bias, _double(linear.bias))
        weight = factor @ weight
    if chain.stays not in chain.path:
        base = _linear(graph_module, chain.stays)
        weight = _double(base.weight) + chain.scale * weight
        bias = _add(_double(base.bias), None if bias is None else chain.scale * bias)
    return weight, bias


def _double(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().double()


def _add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _find_scale(node: Node) -> tuple[float, Node] | None:
    """Returns the factor of a product or quotient with a number, and its other operand."""
    if node.target not in (operator.mul, operator.truediv) or len(node.args) != 2 or node.kwargs:
        return None
    x, number = node.args
    if node.target is operator.mul and isinstance(number, Node):
        x, number = number, x
    if not isinstance(x, Node) or type(number) not in (int, float) or not number:
        return None
    assert isinstance(number, int | float)
    if abs(number) > sys.float_info.max:
        return None
    return (float(number) if node.target is operator.mul else 1 / number), x


def _find_source(graph_module: GraphModule, node: Node | None) -> tuple[list[Node], Node | None]:
    """Returns the no-ops before a node, last first, and the node that they start from."""
    between: list[Node] = []
    while node is not None and (no_op := find_local_no_op(graph_module, node)) is not None:
        between += reversed(no_op.nodes)
        node = no_op.source
    return between, node


def _is_linear(graph_module: GraphModule, node: Node) -> bool:
    return isinstance(modules.called_module(graph_module, node), nn.Linear) and modules.sole_input(node) is not None


def _linear(graph_module: GraphModule, call: Node) -> nn.Linear:
    linear = graph_module.get_submodule(str(call.target))
    assert isinstance(linear, nn.Linear)
    return linear
