"""Axes of results, and the axes of inputs that they come from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport.transformations.analysis import modules

aten = torch.ops.aten

PERMUTATIONS = (
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.mT.default, aten.swapaxes.default),
    *(aten.swapdims.default, aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist),
)
# Operators that keep all numbers, in the same order.
_RESHAPES = (
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "contiguous", "clone", "alias"),
    *("view_as", "reshape_as"),
)


def permutation(node: Node) -> list[int]:
    """Returns the order of axes of a permutation; empty for other nodes."""
    value = node.meta.get("val")
    if node.target not in PERMUTATIONS or not isinstance(value, torch.Tensor) or node.kwargs or not value.dim():
        return []
    sizes = torch.empty(*range(2, 2 + value.dim()), device="meta")  # every axis has another size
    target: Any = node.target
    return [size - 2 for size in target(sizes, *node.args[1:]).shape]


def find_source_axis(node: Node, axis: int | None) -> int | None:
    """Returns the axis of a node's first argument that becomes an axis of its result, at all sizes.

    None if the node splits the axis, joins it with others, or does more than change the shape.
    """
    source = node.args[0] if node.args else None
    if axis is None or not isinstance(node.target, torch._ops.OpOverload) or not isinstance(source, Node):
        return None
    if order := permutation(node):
        return order[axis]
    value, before = node.meta.get("val"), source.meta.get("val")
    if modules.operator_name(node) not in _RESHAPES or not isinstance(before, torch.Tensor):
        return None
    if not isinstance(value, torch.Tensor) or value.dtype != before.dtype:
        return None
    position = math.prod(value.shape[:axis]), value.shape[axis]
    for source_axis, size in enumerate(before.shape):
        pairs = zip(position, (math.prod(before.shape[:source_axis]), size), strict=True)
        if all(statically_known_true(a == b) for a, b in pairs):
            return source_axis
    return None


def reads_shape(node: Node, source: Node) -> bool:
    """Returns True if a node reads only the shape of an argument."""
    if modules.operator_name(node) in ("view_as", "reshape_as", "expand_as"):
        return source not in node.args[:1] and "self" not in node.kwargs
    return modules.measures(node)
