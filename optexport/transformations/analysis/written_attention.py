"""Attention that is written out: what its scores are made of, and how it is masked."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport.transformations.analysis import effects, memory, modes, modules, strides
from optexport.transformations.analysis.bounds import bounds
from optexport.transformations.rule import Match, Skip

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_CASTS = (aten.to.dtype, aten._to_copy.default)
_FACTORS = (operator.mul, operator.truediv, aten.mul_.Tensor, aten.div_.Tensor)
# From here on every score is lost beside a number that is added to it, whatever the precision.
_DROWNS = -1e30
# What hides a position: no softmax gives anything to a score so far below the others.
_HIDES = -1e4
# In half precision what is added to a score rounds it to fewer digits than this.
_HALF = -128.0
# How many steps between the product and the softmax are looked at.
_DEPTH = 8


@dataclass(frozen=True)
class Attention(Match):
    """Attention, written out.

    Attributes:
        nodes: Its nodes, from the first product to the last.
        query: What the scores are made of, ...
        key: ... and this, with its last two axes swapped still, if `swapped`.
        scale: The factor of the scores.
        mask: What is added to them, or tells by True or False which of them are kept or dropped; None if nothing.
        kept: Whether it is the True of the mask that is kept.
        fill: What dropped scores become, where it has to be added to them; None where they become minus infinity.
    """

    query: Node
    key: Node
    swapped: bool
    value: Node
    scale: float
    mask: Node | None
    kept: bool
    fill: float | None


def read(graph_module: GraphModule, node: Node) -> Attention | Skip | None:
    """The attention whose last product a node is.

    Returns:
        Why it cannot be one call, where it is attention nearly; None where the node is something else.
    """
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    weights, value = node.args
    parts, chain = _Parts(graph_module), [node]
    softmax = _down(weights, chain, parts)
    if softmax is None or not isinstance(value, Node):
        return None
    chain.append(softmax)
    scores: Any = softmax.args[0]
    if (rank := modules.dims(scores)) is None or modules.dims(node) is None:
        return Skip("its shapes are not known: trace with example inputs")
    if softmax.args[1] not in (-1, rank - 1):
        return None
    product = parts.read_scores(scores, chain)
    if product is None:
        return None if parts.reason is None else Skip(parts.reason)
    chain.append(product)
    reason = parts.reason or _why_not_chain(chain) or parts.why_not(chain, value)
    if reason is None and (user := strides.needs_contiguous(graph_module, node, None)) is not None:
        reason = f"{user.name} views its result, or may, in a shape that only contiguous memory can take"
    if reason or (reason := parts.read_mask(scores)):
        return Skip(reason)
    query, key, swapped = parts.query, parts.key, parts.swapped
    assert query is not None and key is not None
    nodes = tuple(reversed(chain))
    return Attention(nodes, query, key, swapped, value, parts.scale, parts.mask, parts.kept, parts.fill)


class _Parts:
    """What attention is made of, and the first reason that was found why it is left alone."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.reason: str | None = None
        self.query: Node | None = None
        self.key: Node | None = None
        self.swapped = True
        self.scale = 1.0
        self.mask: Node | None = None
        self.kept = True
        self.fill: float | None = None
        self._added = False
        self._passed: list[Node] = []
        self._graph_module = graph_module

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def read_scores(self, scores: Node, chain: list[Node]) -> Node | None:
        """Goes up from the scores to the product that made them, and reads mask and factor on the way."""
        scaled = False
        while True:
            if scores.target in _PRODUCTS and not scores.kwargs:
                self._read_factors(scores)
                return scores
            if (inner := _cast(scores)) is not None:
                if torch.promote_types(_dtype(scores), _dtype(inner)) != _dtype(scores):
                    self.refuse("its scores are cast to a narrower dtype")
            elif (constant := _factor(self._graph_module, scores)) is not None:
                inner, scale = constant
                self.scale, scaled = self.scale * scale, True
            elif (masking := _masking(self._graph_module, scores)) is not None:
                inner, mask, self.kept, self.fill = masking
                if self.mask is not None:
                    self.refuse("it has more than one mask")
                if scaled:
                    self.refuse("it is masked before it is scaled")
                self.mask, self._added = mask, self.fill is None
                if self.fill is not None and -math.inf < self.fill < torch.finfo(_dtype(scores)).min:
                    self.refuse(f"its scores are filled with {self.fill}, which is beyond their dtype")
            else:
                if (factor := _tensor_factor(self._graph_module, scores)) is not None:
                    self.refuse(f"its scores are multiplied or divided by {factor.name}, which is no constant number")
                return None
            chain.append(scores)
            scores = inner

    def _read_factors(self, product: Node) -> None:
        query, key = product.args
        assert isinstance(query, Node) and isinstance(key, Node)
        self.query, self.key = self._unscaled(query), self._unscaled(key)
        if (key := _swapped(self.key)) is not None:
            self._passed.append(self.key)
            self.key, self.swapped = self._unscaled(key), False

    def _unscaled(self, node: Node) -> Node:
        factor = _factor(self._graph_module, node)
        # What is done in place is seen by others too.
        if factor is None or len(node.users) > 1 or effects.mutated(self._graph_module, node):
            return node
        if factor[1] <= 0 or _dtype(factor[0]) != _dtype(node):
            return node
        self.scale *= factor[1]
        self._passed.append(node)
        return factor[0]

    def why_not(self, chain: list[Node], value: Node) -> str | None:
        assert self.query is not None and self.key is not None
        given = [self.query, self.key, value]
        if any(not isinstance(node.meta.get("val"), torch.Tensor) for node in (*given, *chain)):
            return "its shapes are not known: trace with example inputs"
        shapes = [node.meta["val"].shape for node in given]
        if len(shapes[0]) not in (3, 4) or len({len(shape) for shape in shapes}) > 1:
            return "its queries, keys and values have other than three or four axes"
        if not (modules.is_fixed(shapes[0][-1]) and modules.is_fixed(shapes[2][-1])):
            return "its head size is not fixed"
        for leading in zip(*(shape[:-2] for shape in shapes), strict=True):
            if not all(statically_known_true(leading[0] == size) for size in leading[1:]):
                return "its queries, keys and values differ in their leading sizes"
        dtypes = {_dtype(node) for node in (*given, chain[0], chain[-1])}
        if len(dtypes) > 1 or not _dtype(value).is_floating_point:
            return "its queries, keys and values differ in dtype"
        wide = torch.promote_types(_dtype(value), torch.float32)
        for dtype in {_dtype(node) for node in chain} - {_dtype(value), wide}:
            return (
                f"its scores are cast to a {'wider' if torch.promote_types(dtype, wide) == dtype else 'narrower'} dtype"
            )
        for node in chain[1:]:
            sizes = zip(node.meta["val"].shape, chain[-1].meta["val"].shape, strict=False)
            if modules.dims(node) != len(shapes[0]) or not all(statically_known_true(a == b) for a, b in sizes):
                return "its mask has more rows than its scores"
        if not 0 < self.scale < math.inf:
            return f"its scores are multiplied by {self.scale}"
        for node in (*given, *chain[-1].all_input_nodes, *([self.mask] if self.mask else [])):
            # What was read early, the queries, say, is now read at the end.
            if change := memory.changed_between(self._graph_module, node, min(node.users), chain[0]):
                return f"{node.name} is changed in place by {change.name} in between"
        return modes.why_apart(self._graph_module, (*chain, *self._passed))

    def read_mask(self, scores: Node) -> str | None:
        """Whether the mask is the same to a single call, and how to hand it over."""
        if self.mask is None:
            return None
        assert self.query is not None
        dtype = _dtype(self.query)
        if self.mask.meta["val"].dim() < 2:
            return f"its mask {self.mask.name} has less than two axes"
        half = torch.finfo(dtype).bits < 32
        if self._added:
            if _dtype(self.mask) != dtype:
                return f"its mask {self.mask.name} is of another dtype"
            found = bounds(self._graph_module, self.mask)
            shown = bounds(self._graph_module, self.mask, first=True)
            if shown is not None and shown[0] >= _HALF and shown[1] < math.inf:
                return None
            if found is None or found[0] == -math.inf or found[1] == math.inf:
                return f"its mask {self.mask.name} may be infinite in a whole row"
            drowns = found[0] >= _HALF or found[0] <= _DROWNS
            return None if drowns or not half else f"its mask {self.mask.name} drowns scores in half precision"
        shown = bounds(self._graph_module, self.mask, first=True)
        assert self.fill is not None
        drowning = max(self.fill, torch.finfo(dtype).min)
        if self.fill <= _HIDES and shown == ((1, 1) if self.kept else (0, 0)):
            self.fill = None
        elif self.fill == -math.inf:
            return f"its mask {self.mask.name} may hide a whole row by minus infinity"
        elif drowning > _DROWNS:
            return f"its mask {self.mask.name} may hide a whole row by {self.fill}, which drowns no scores"
        else:
            self.fill = drowning
        return None


def _down(weights: Any, chain: list[Node], parts: _Parts) -> Node | None:
    """The softmax that weights come from, through casts and a dropout."""
    while isinstance(weights, Node):
        if weights.target in (aten.softmax.int, aten._softmax.default):
            return weights
        inner = _cast(weights)
        if weights.target is aten.dropout.default:
            inner = weights.args[0]  # type: ignore[assignment]
            if weights.args[2] is not False:
                parts.refuse("its dropout is in train mode")
        if inner is None:
            return None
        chain.append(weights)
        weights = inner
    return None


def _cast(node: Node) -> Node | None:
    """What a node gives in another, or the same, floating dtype."""
    value = node.meta.get("val")
    if node.target not in _CASTS or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def _swapped(node: Node) -> Node | None:
    """What a node swaps the last two axes of."""
    source = node.args[0] if node.args else None
    rank = modules.dims(source) if isinstance(source, Node) else None
    if not isinstance(source, Node) or rank is None or rank < 2:
        return None
    axes: Any = node.args[1:]
    swaps = node.target is aten.mT.default
    if node.target is aten.transpose.int:
        swaps = {axis % rank for axis in axes} == {rank - 2, rank - 1}
    elif node.target is aten.permute.default:
        swaps = [axis % rank for axis in axes[0]] == [*range(rank - 2), rank - 1, rank - 2]
    return source if swaps else None


def _factor(graph_module: GraphModule, node: Node) -> tuple[Node, float] | None:
    """What a node multiplies, and by which constant number."""
    if node.target not in _FACTORS or len(node.args) != 2:
        return None
    if node.kwargs or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    divides = node.target in (operator.truediv, aten.div_.Tensor)
    for x, other in (node.args, node.args[::-1])[: 1 if divides or node.target is aten.mul_.Tensor else 2]:
        number = _number(graph_module, other)
        if isinstance(x, Node) and number is not None and isinstance(x.meta.get("val"), torch.Tensor):
            return (x, (1 / number if number else math.inf) if divides else number)
    return None


def _tensor_factor(graph_module: GraphModule, node: Node) -> Node | None:
    """What scores are multiplied or divided by that is no constant number."""
    if node.target not in _FACTORS or len(node.args) != 2 or not all(isinstance(arg, Node) for arg in node.args):
        return None
    one, other = cast(tuple[Node, Node], node.args)
    if _comes_from_product(graph_module, one):
        return other
    return one if node.target is operator.mul and _comes_from_product(graph_module, other) else None


def _number(graph_module: GraphModule, value: Any) -> float | None:
    if type(value) in (int, float):
        return float(value) if math.isfinite(value) else None
    held = memory.constant(graph_module, value)
    if held is None or held.dim() or held.is_complex() or not bool(held.isfinite()):
        return None
    return float(held)


def _masking(graph_module: GraphModule, node: Node, depth: int = 0) -> tuple[Node, Node, bool, float | None] | None:
    """What is masked, by what, whether its True is kept, and with what the others are filled: None if it is added."""
    args: tuple[Any, ...] = node.args
    match node.target:
        case operator.add | aten.add_.Tensor if not node.kwargs and len(args) == 2:
            # The scores are what a product, or a factor of one, has made.
            for x, mask in (args, args[::-1])[: 1 if node.target is aten.add_.Tensor else 2]:
                if isinstance(mask, Node) and isinstance(x, Node) and _comes_from_product(graph_module, x, depth):
                    return x, mask, True, None
            return None
        case aten.masked_fill.Scalar | aten.masked_fill_.Scalar | aten.masked_fill.Tensor:
            x, mask, fill, kept = *args, False
        case aten.where.ScalarOther | aten.where.self:
            mask, x, fill, kept = *args, True
            if not (isinstance(x, Node) and _comes_from_product(graph_module, x, depth)):
                x, fill, kept = fill, x, False
        case aten.where.ScalarSelf:
            mask, fill, x, kept = *args, False
        case _:
            return None
    if not isinstance(x, Node):  # a number for what is masked: neither side of it is a tensor of scores
        return None
    number = fill if type(fill) in (int, float) else _filled(graph_module, fill)
    if number is None or math.isnan(number) or not isinstance(mask, Node) or _dtype(mask) is not torch.bool:
        return None
    return x, mask, kept, number


def _filled(graph_module: GraphModule, value: Any) -> float | None:
    found = bounds(graph_module, value) if isinstance(value, Node) else None
    return found[0] if found and found[0] == found[1] else None


def _comes_from_product(graph_module: GraphModule, node: Node, depth: int = 0) -> bool:
    if node.target in _PRODUCTS or depth == _DEPTH:
        return node.target in _PRODUCTS
    factor, inner = _factor(graph_module, node), _cast(node)
    if factor is None and inner is None:
        masking = _masking(graph_module, node, depth + 1)
        return masking is not None and _comes_from_product(graph_module, masking[0], depth + 1)
    return _comes_from_product(graph_module, factor[0] if factor else inner, depth + 1)  # type: ignore[arg-type]


def _why_not_chain(chain: list[Node]) -> str | None:
    used = next((node for node in chain[1:] if len(node.users) > 1), None)
    return None if used is None else f"{used.name} is used elsewhere too"


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
