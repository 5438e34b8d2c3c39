"""FoldNormAffine: the gain and shift of a norm become part of the linears that read it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport.transformations.analysis import folding, memory, modules, usage
from optexport.transformations.remove_no_ops import find_local_no_op
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
    """Folds the gain and shift of a norm into the linears that read it.

    Linear(g * norm(x) + b)  ->  Linear'(norm(x))

    For an ``nn.LayerNorm`` over the last axis, and for products with a constant vector along the last axis, with which
    an RMSNorm ends. All users must be linears. Inactive dropouts, and slices or selections along other axes, may lie
    between.

    Skips:   a norm with other users; a norm or linear that is shared, tied, hooked, parametrized, of a subclass or
             called more than once; mixed dtypes, devices or requires_grad; a product of unknown shape, or whose input
             is changed in place before the linears read it; weights that would overflow or become subnormal.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the weights are rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        # Matches at the last linear that reads the norm, so that a rewrite can expose a match before it.
        norm = modules.sole_input(node) if isinstance(modules.called_module(graph_module, node), nn.Linear) else None
        while norm is not None and isinstance(source := norm.args[0] if norm.args else None, Node):
            if not _keeps_features(graph_module, source, norm):
                break
            norm = source
        affine = None if norm is None else _find_affine(graph_module, norm)
        if norm is None or affine is None:
            return None
        source, gain, shift = affine
        linears, other_users = _readers(graph_module, norm)
        if max(linears) is not node:
            return None
        if other_users:
            return Skip(f"{norm.name} is also used by {other_users[0].name}")
        is_layer = source is norm
        reason = folding.find_replacement_problem(graph_module, norm) if is_layer else _find_shape_problem(norm, source)
        if not is_layer and (change := memory.find_change_between(graph_module, source, norm, node)):
            reason = reason or f"{source.name} is changed in place by {change.name} before {node.name} reads it"
        for call in linears:
            reason = reason or _find_linear_problem(graph_module, call, gain, shift)
        return Skip(reason) if reason else Fold((norm, *linears), norm, tuple(linears))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        affine = _find_affine(graph_module, match.norm)
        assert affine is not None
        source, gain, shift = affine
        for call in match.linears:
            folded = _fold(modules.called_module(graph_module, call), gain, shift)
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


def _find_affine(graph_module: GraphModule, node: Node) -> tuple[Node, torch.Tensor, torch.Tensor | None] | None:
    """Returns the value without gain and shift, the gain, and the shift.

    For a layer norm, the value is the norm.
    """
    norm = modules.called_module(graph_module, node)
    if isinstance(norm, nn.LayerNorm):
        return None if norm.weight is None or len(norm.normalized_shape) != 1 else (node, norm.weight, norm.bias)
    product = _find_product(graph_module, node)
    return None if product is None else (*product, None)


def _find_product(graph_module: GraphModule, node: Node) -> tuple[Node, torch.Tensor] | None:
    """Returns the factors of a product with a constant vector."""
    if node.target is not operator.mul or len(node.args) != 2 or node.kwargs:
        return None
    for x, constant in (node.args, node.args[::-1]):
        gain = memory.find_constant(graph_module, constant)
        if isinstance(x, Node) and x is not constant and gain is not None and gain.dim() == 1:
            return x, gain
    return None


def _readers(graph_module: GraphModule, node: Node) -> tuple[list[Node], list[Node]]:
    """Returns the linears that read a node, or positions of it, and its other users."""
    linears: list[Node] = []
    other_users: list[Node] = []
    ahead = [node]
    while ahead:
        read = ahead.pop()
        for user in read.users:
            if isinstance(modules.called_module(graph_module, user), nn.Linear):
                linears.append(user)
            elif user.users and _keeps_features(graph_module, read, user):
                ahead.append(user)
            else:
                other_users.append(user)
    return linears, other_users


def _keeps_features(graph_module: GraphModule, node: Node, user: Node) -> bool:
    """Returns True if a user returns positions of a node with all their features."""
    if (no_op := find_local_no_op(graph_module, user)) is not None:
        return no_op.source is node
    rank = modules.dims(node)
    if user.target not in (aten.slice.Tensor, aten.select.int) or rank is None or user.kwargs:
        return False
    axis: Any = user.args[1] if len(user.args) > 1 else 0
    return bool(axis % rank != rank - 1)


def _find_shape_problem(product: Node, source: Node) -> str | None:
    before, after = source.meta.get("val"), product.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return f"the shape of {source.name} is unknown (trace with example inputs)"
    comparable = before.dtype == after.dtype and before.dim() == after.dim()
    if not comparable or not all(statically_known_true(a == b) for a, b in zip(before.shape, after.shape, strict=True)):
        return f"{product.name} and {source.name} differ in shape or dtype"
    return None


def _find_linear_problem(
    graph_module: GraphModule, call: Node, gain: torch.Tensor, shift: torch.Tensor | None
) -> str | None:
    if reason := folding.find_replacement_problem(graph_module, call):
        return reason
    linear: Any = modules.called_module(graph_module, call)
    if gain.shape != (linear.in_features,):
        return f"{call.target}: wrong number of features (expected {len(gain)}, found {linear.in_features})"
    tensors = [gain, *linear.parameters()] + ([] if shift is None else [shift])
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return f"{call.target} and the norm differ in dtype or device"
    if reason := folding.find_training_problem(linear, [gain, shift]):
        return f"{call.target} and the norm: {reason}"
    return folding.find_range_problem(call.target, *_fold(linear, gain, shift))


def _fold(linear: Any, gain: torch.Tensor, shift: torch.Tensor | None) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """Returns a linear and its weight and bias after folding, in float64."""
    weight, bias = linear.weight.detach().double(), linear.bias
    if shift is not None:
        shifted = weight @ shift.detach().double()
        bias = shifted if bias is None else bias.detach().double() + shifted
    return linear, weight * gain.detach().double(), bias
