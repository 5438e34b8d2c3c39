"""Which operations compute every position along an axis by itself, and from which positions of their inputs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport._utils import aten_ops
from optexport.transformations.analysis import effects, modules

aten = torch.ops.aten

_ELEMENT_WISE = {
    *(aten.contiguous.default, aten.clone.default, aten.alias.default, aten.to.dtype, aten._to_copy.default),
    *(operator.add, operator.sub, operator.mul, operator.truediv),
}


def feeds(graph_module: GraphModule, node: Node, axis: int, *, whole: bool = True) -> dict[Node, int] | None:
    """The inputs that a position of a node's result is computed from at that position alone, and its axis in each.

    Args:
        axis: The axis of the position in the result, counted from 0.
        whole: Whether the inputs have as many positions as the result has now.

    Returns:
        None where other positions are needed too, or where nothing is known.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or effects.mutated(graph_module, node):
        return None
    if any(not isinstance(source.meta.get("val"), torch.Tensor) for source in _tensors(node)):
        return None
    if node.op == "call_module":
        return _of_module(graph_module, node, axis, value.dim())
    return _of_operator(node, axis, value, whole) if node.op == "call_function" else None


def _of_module(graph_module: GraphModule, node: Node, axis: int, rank: int) -> dict[Node, int] | None:
    module, x = modules.called_module(graph_module, node), modules.sole_input(node)
    if module is None or x is None or modules.has_hooks(module):
        return None
    if type(module) not in (nn.Linear, nn.LayerNorm, nn.Embedding):
        return None
    features = len(module.normalized_shape) if isinstance(module, nn.LayerNorm) else 1
    return {x: axis} if axis < rank - features else None


def _of_operator(node: Node, axis: int, value: torch.Tensor, whole: bool) -> dict[Node, int] | None:
    args: tuple[Any, ...] = node.args
    rank = value.dim()
    first: Any = args[0] if args else None
    its_own = {first: axis} if isinstance(first, Node) else None
    match node.target:
        case target if target in _ELEMENT_WISE or torch.Tag.pointwise in getattr(target, "tags", ()):
            return _broadcast(_tensors(node), value, axis, whole)
        case aten.dropout.default:
            return its_own if args[2] is False else None
        case aten.softmax.int | aten._softmax.default:
            return its_own if args[1] % rank != axis else None
        case aten.mean.dim if args[1] and (args[2] if len(args) > 2 else node.kwargs.get("keepdim")):
            return its_own if axis not in [dim % rank for dim in args[1]] else None
        case aten.transpose.int:
            one, other = args[1] % rank, args[2] % rank
            return {first: {one: other, other: one}.get(axis, axis)}
        case aten.view.default | aten.reshape.default:
            before = first.meta["val"].shape[: axis + 1]
            ends = axis + 1 if whole else axis
            kept = len(before) > axis and all(_equal(*sizes) for sizes in zip(before[:ends], value.shape, strict=False))
            return its_own if kept else None
        case aten.slice.Tensor:
            given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
            dim, start, end, step = given
            everything = start in (0, None) and (end is None or end == sys.maxsize) and step == 1
            return its_own if everything or dim % rank != axis else None
        case operator.getitem if isinstance(args[1], tuple):
            return its_own if len(args[1]) == 2 and args[1][0] is Ellipsis and axis < rank - 1 else None
        case aten.cat.default:
            # An empty part may have a single axis, whatever the rank of the others.
            alike = all(modules.dims(part) == rank for part in first)
            return dict.fromkeys(first, axis) if alike and (args[1] if len(args) > 1 else 0) % rank != axis else None
        case aten.matmul.default:
            rows = axis == rank - 2 == first.meta["val"].dim() - 2
            return its_own if rows and first is not args[1] else None
        case aten.scaled_dot_product_attention.default:
            return _of_attention(node, axis, value, whole)
    return None


def _of_attention(node: Node, axis: int, value: torch.Tensor, whole: bool) -> dict[Node, int] | None:
    """Queries are computed one by one, unless the mask is causal, which knows them by their position."""
    given = aten_ops.arguments(node)
    query, mask = given["query"], given["attn_mask"]
    if axis != value.dim() - 2 or given["dropout_p"] or given["is_causal"]:
        return None
    if query in (given["key"], given["value"], mask):
        return None
    masks = _broadcast([mask], value, axis, whole) if isinstance(mask, Node) else {}
    return None if masks is None else {query: axis, **masks}


def _broadcast(sources: Iterable[Node], value: torch.Tensor, axis: int, whole: bool) -> dict[Node, int] | None:
    """The axis in each operand of an operation that broadcasts them, where they have more than one position."""
    found = {}
    for source in sources:
        shape = source.meta["val"].shape
        its_axis = axis - (value.dim() - len(shape))
        if its_axis < 0 or (type(shape[its_axis]) is int and shape[its_axis] == 1):
            continue
        if whole and not _equal(shape[its_axis], value.shape[axis]):
            return None
        found[source] = its_axis
    return found


def _tensors(node: Node) -> list[Node]:
    """The inputs of a node that are tensors, or of which nothing is known."""
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat | int)]


def _equal(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)
