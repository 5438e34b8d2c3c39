"""The gain and shift of a norm become part of the linears that read it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport.transformations.analysis import folding, memory, modules, usage
from optexport.transformations.remove_no_ops import handed_through
from optexport.transformations.rule import Match, Rule, Skip

aten = torch.ops.aten


@dataclass(frozen=True)
class Fold(Match):
    """A gain before linears.

    Attributes:
        norm: The call of the layer norm, or the product with the gain.
        linears: The calls of the linears.
    """

    norm: Node
    linears: tuple[Node, ...]


@dataclass(frozen=True)
class FoldNormAffine(Rule):
    """Linear(g * norm(x) + b)  ->  Linear'(norm(x))

    For an ``nn.LayerNorm`` over the last axis, which then is one without gain and shift, and for any product with a
    constant vector along the last axis, as an RMSNorm ends in one. All users have to be linears, behind a dropout
    outside of training or a slice or selection along another axis or not.

    Skips:   a norm that is used elsewhere too; a norm or linear that is shared, tied, hooked, parametrized, of a
             subclass or called more than once; mixed dtypes or devices, or requires_grad; of a product, a shape that
             is not known; an input of a product that is changed in place before the linears read it; weights that
             would overflow or become subnormal.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the weights are rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        # It is found at the last linear that reads it, so that what stands before it can come next.
        norm = modules.sole_input(node) if isinstance(modules.called_module(graph_module, node), nn.Linear) else None
        while norm is not None and isinstance(source := norm.args[0] if norm.args else None, Node):
            if not _keeps_features(graph_module, source, norm):
                break
            norm = source
        found = None if norm is None else _affine(graph_module, norm)
        if norm is None or found is None:
            return None
        source, gain, shift = found
        linears, others = _readers(graph_module, norm)
        if max(linears) is not node:
            return None
        if others:
            return Skip(f"{norm.name} is used by {others[0].name} too")
        reason = folding.why_not_replaceable(graph_module, norm) if source is norm else _why_not_product(norm, source)
        if source is not norm and (change := memory.changed_between(graph_module, source, norm, node)):
            reason = reason or f"{source.name} is changed in place by {change.name} before {node.name} reads it"
        for call in linears:
            reason = reason or _why_not_linear(graph_module, call, gain, shift)
        return Skip(reason) if reason else Fold((norm, *linears), norm, tuple(linears))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        found = _affine(graph_module, match.norm)
        assert found is not None
        source, gain, shift = found
        for call in match.linears:
            folded = _folded(modules.called_module(graph_module, call), gain, shift)
            modules.replace_module(graph_module, str(call.target), folding.with_weights(*folded))
        norm = modules.called_module(graph_module, match.norm)
        if isinstance(norm, nn.LayerNorm):
            bare = modules.with_parameters(norm, weight=None, bias=None)
            bare.elementwise_affine = False
            modules.replace_module(graph_module, str(match.norm.target), bare)
        else:
            (constant,) = (read for read in match.norm.all_input_nodes if read is not source)
            match.norm.replace_all_uses_with(source)
            graph_module.graph.erase_node(match.norm)
            usage.forget(graph_module, constant)
        return [(call, None) for call in match.linears]


def _affine(graph_module: GraphModule, node: Node) -> tuple[Node, torch.Tensor, torch.Tensor | None] | None:
    """What linears read without gain and shift, and these: of a layer norm itself, or of a product with a constant."""
    norm = modules.called_module(graph_module, node)
    if isinstance(norm, nn.LayerNorm):
        return None if norm.weight is None or len(norm.normalized_shape) != 1 else (node, norm.weight, norm.bias)
    found = _product(graph_module, node)
    return None if found is None else (*found, None)


def _product(graph_module: GraphModule, node: Node) -> tuple[Node, torch.Tensor] | None:
    """What a node multiplies by a constant vector, and that."""
    if node.target is not operator.mul or len(node.args) != 2 or node.kwargs:
        return None
    for x, other in (node.args, node.args[::-1]):
        gain = memory.constant(graph_module, other)
        if isinstance(x, Node) and x is not other and gain is not None and gain.dim() == 1:
            return x, gain
    return None


def _readers(graph_module: GraphModule, node: Node) -> tuple[list[Node], list[Node]]:
    """The linears that read a node or positions of it, and what else does."""
    linears: list[Node] = []
    others: list[Node] = []
    ahead = [node]
    while ahead:
        read = ahead.pop()
        for user in read.users:
            if isinstance(modules.called_module(graph_module, user), nn.Linear):
                linears.append(user)
            elif user.users and _keeps_features(graph_module, read, user):
                ahead.append(user)
            else:
                others.append(user)
    return linears, others


def _keeps_features(graph_module: GraphModule, node: Node, user: Node) -> bool:
    """Whether a node gives positions of another with their features as they are."""
    if (found := handed_through(graph_module, user)) is not None:
        return found.source is node
    rank = modules.dims(node)
    if user.target not in (aten.slice.Tensor, aten.select.int) or rank is None or user.kwargs:
        return False
    axis: Any = user.args[1] if len(user.args) > 1 else 0
    return bool(axis % rank != rank - 1)


def _why_not_product(node: Node, source: Node) -> str | None:
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return f"the shape of {source.name} is not known: trace with example inputs"
    alike = before.dtype == after.dtype and before.dim() == after.dim()
    if not alike or not all(statically_known_true(a == b) for a, b in zip(before.shape, after.shape, strict=True)):
        return f"{node.name} has another shape or dtype than {source.name}"
    return None


def _why_not_linear(
    graph_module: GraphModule, call: Node, gain: torch.Tensor, shift: torch.Tensor | None
) -> str | None:
    if reason := folding.why_not_replaceable(graph_module, call):
        return reason
    linear: Any = modules.called_module(graph_module, call)
    if gain.shape != (linear.in_features,):
        return f"{call.target}: it has {linear.in_features} features, and not {len(gain)}"
    tensors = [gain, *linear.parameters()] + ([] if shift is None else [shift])
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return f"{call.target}: it differs from the norm in dtype or device"
    if reason := folding.why_not_trained_alike(linear, [gain, shift]):
        return f"{call.target} and the norm: {reason}"
    return folding.why_not_held(call.target, *_folded(linear, gain, shift))


def _folded(
    linear: Any, gain: torch.Tensor, shift: torch.Tensor | None
) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """A linear, and its weight and bias for what the norm gives without gain and shift, in float64."""
    weight, bias = linear.weight.detach().double(), linear.bias
    if shift is not None:
        moved = weight @ shift.detach().double()
        bias = moved if bias is None else bias.detach().double() + moved
    return linear, weight * gain.detach().double(), bias
