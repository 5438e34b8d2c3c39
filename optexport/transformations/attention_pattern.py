"""Recognizes attention that is written as separate operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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
# Adding this, or less, to a score absorbs the score completely in any precision.
_ABSORBS = -1e30
# Softmax gives no weight to a score that is lower than others by this much.
_HIDES = -1e4
# In half precision, adding less than this to a score rounds the score to fewer digits.
_HALF = -128.0
# Maximum number of operations between the product and the softmax.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Attention(Match):
    """Attention that is written as separate operations.

    Attributes:
        nodes: Its nodes, from the first product to the last.
        query: The queries.
        key: The keys, with their last two axes transposed if `key_is_transposed`.
        value: The values.
        scale: The factor of the scores.
        mask: Added to the scores, or a boolean mask that selects scores. None without a mask.
        keeps_true: True if the scores where a boolean mask is True are kept, False if they are dropped.
        fill: Number that is added to dropped scores; None if they become minus infinity.
    """

    query: Node
    key: Node
    key_is_transposed: bool
    value: Node
    scale: float
    mask: Node | None
    keeps_true: bool
    fill: float | None


def find_attention(graph_module: GraphModule, node: Node) -> Attention | Skip | None:
    """Returns the attention whose last product a node is.

    Returns:
        A `Skip` if the attention cannot be replaced by one call; None if the node is something else.
    """
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    weights, value = node.args
    reader, chain = _Reader(graph_module), [node]
    softmax = reader.find_softmax(weights, chain)
    if softmax is None or not isinstance(value, Node):
        return None
    chain.append(softmax)
    scores: Any = softmax.args[0]
    if (rank := modules.dims(scores)) is None or modules.dims(node) is None:
        return Skip("the shapes of the attention are unknown (trace with example inputs)")
    if softmax.args[1] not in (-1, rank - 1):
        return None
    product = reader.read_scores(scores, chain)
    if product is None:
        return None if reader.problem is None else Skip(reader.problem)
    chain.append(product)
    reason = reader.problem or _find_user_problem(chain) or reader.find_problem(chain, value)
    if reason is None and (user := strides.needs_contiguous(graph_module, node, None)) is not None:
        reason = f"{user.name} may view the result in a shape that requires contiguous memory"
    if reason or (reason := reader.read_mask()):
        return Skip(reason)
    query, key = reader.query, reader.key
    assert query is not None and key is not None
    return Attention(
        tuple(reversed(chain)),
        query,
        key,
        reader.key_is_transposed,
        value,
        reader.scale,
        reader.mask,
        reader.keeps_true,
        reader.fill,
    )


def _find_user_problem(chain: list[Node]) -> str | None:
    shared = next((node for node in chain[1:] if len(node.users) > 1), None)
    return None if shared is None else f"{shared.name} has other users"


class _Reader:
    """Collects the parts of attention, and the first problem that prevents a replacement."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.problem: str | None = None
        self.query: Node | None = None
        self.key: Node | None = None
        self.key_is_transposed = True
        self.scale = 1.0
        self.mask: Node | None = None
        self.keeps_true = True
        self.fill: float | None = None
        self._mask_is_added = False
        self._passed: list[Node] = []
        self._graph_module = graph_module

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    def find_softmax(self, weights: Any, chain: list[Node]) -> Node | None:
        """Returns the softmax that weights come from, and adds casts and a dropout to the chain."""
        while isinstance(weights, Node):
            if weights.target in (aten.softmax.int, aten._softmax.default):
                return weights
            source = _cast_source(weights)
            if weights.target is aten.dropout.default:
                source = weights.args[0]  # type: ignore[assignment]
                if weights.args[2] is not False:
                    self._refuse("the dropout of the attention is in train mode")
            if source is None:
                return None
            chain.append(weights)
            weights = source
        return None

    def read_scores(self, scores: Node, chain: list[Node]) -> Node | None:
        """Returns the product that scores come from. Reads the mask and the scale between them."""
        scaled = False
        while scores.target not in _PRODUCTS or scores.kwargs:
            if (source := _cast_source(scores)) is not None:
                if torch.promote_types(_dtype(scores), _dtype(source)) != _dtype(scores):
                    self._refuse("the attention scores are cast to a narrower dtype")
            elif (factor := _find_factor(self._graph_module, scores)) is not None:
                source, scale = factor
                self.scale, scaled = self.scale * scale, True
            elif (masking := _find_masking(self._graph_module, scores)) is not None:
                source = masking.scores
                self._add_mask(masking, scores, scaled)
            else:
                if (tensor := _find_tensor_factor(self._graph_module, scores)) is not None:
                    self._refuse(
                        f"the attention scores are multiplied or divided by {tensor.name}, which is not constant"
                    )
                return None
            chain.append(scores)
            scores = source
        self._read_operands(scores)
        return scores

    def _add_mask(self, masking: _Masking, masked: Node, scaled: bool) -> None:
        if self.mask is not None:
            self._refuse("the attention has more than one mask")
        if scaled:
            self._refuse("the attention scores are masked before they are scaled")
        self.mask, self.keeps_true, self.fill = masking.mask, masking.keeps_true, masking.fill
        self._mask_is_added = self.fill is None
        if self.fill is not None and -math.inf < self.fill < torch.finfo(_dtype(masked)).min:
            self._refuse(f"the attention scores are filled with {self.fill}, which their dtype cannot represent")

    def _read_operands(self, product: Node) -> None:
        query, key = product.args
        assert isinstance(query, Node) and isinstance(key, Node)
        self.query, self.key = self._without_factor(query), self._without_factor(key)
        if (key := _transpose_source(self.key)) is not None:
            self._passed.append(self.key)
            self.key, self.key_is_transposed = self._without_factor(key), False

    def _without_factor(self, node: Node) -> Node:
        factor = _find_factor(self._graph_module, node)
        # The result of an in-place product has other readers.
        if factor is None or len(node.users) > 1 or effects.mutated_inputs(self._graph_module, node):
            return node
        source, scale = factor
        if scale <= 0 or _dtype(source) != _dtype(node):
            return node
        self.scale *= scale
        self._passed.append(node)
        return source

    def find_problem(self, chain: list[Node], value: Node) -> str | None:
        """Returns why the nodes cannot be replaced by one call, or None."""
        assert self.query is not None and self.key is not None
        inputs = [self.query, self.key, value]
        if any(not isinstance(node.meta.get("val"), torch.Tensor) for node in (*inputs, *chain)):
            return "the shapes of the attention are unknown (trace with example inputs)"
        return next(filter(None, self._find_problems(chain, inputs)), None)

    def _find_problems(self, chain: list[Node], inputs: list[Node]) -> Iterator[str | None]:
        yield _find_shape_problem(inputs)
        yield _find_dtype_problem(chain, inputs)
        yield _find_mask_shape_problem(chain, inputs)
        if not 0 < self.scale < math.inf:
            yield f"the attention scores are multiplied by {self.scale}"
        for node in (*inputs, *chain[-1].all_input_nodes, *([self.mask] if self.mask else [])):
            # The call reads its inputs where the last product was, which is later than before.
            if change := memory.find_change_between(self._graph_module, node, min(node.users), chain[0]):
                yield f"{node.name} is changed in place by {change.name} before the attention ends"
        yield modes.find_mode_problem(self._graph_module, (*chain, *self._passed))

    def read_mask(self) -> str | None:
        """Decides how to pass the mask. Returns why one call would treat it differently, or None."""
        if self.mask is None:
            return None
        if self.mask.meta["val"].dim() < 2:
            return f"the mask {self.mask.name} has fewer than two axes"
        return self._find_added_mask_problem(self.mask) if self._mask_is_added else self._choose_fill(self.mask)

    def _find_added_mask_problem(self, mask: Node) -> str | None:
        assert self.query is not None
        dtype = _dtype(self.query)
        if _dtype(mask) != dtype:
            return f"the mask {mask.name} has another dtype"
        values = bounds(self._graph_module, mask)
        first_values = bounds(self._graph_module, mask, first=True)
        if first_values is not None and first_values[0] >= _HALF and first_values[1] < math.inf:
            return None
        if values is None or values[0] == -math.inf or values[1] == math.inf:
            return f"the mask {mask.name} may be infinite in a whole row"
        precise = values[0] >= _HALF or values[0] <= _ABSORBS or torch.finfo(dtype).bits >= 32
        return None if precise else f"the mask {mask.name} rounds scores in half precision"

    def _choose_fill(self, mask: Node) -> str | None:
        """Sets `fill` to None if minus infinity gives the same result."""
        assert self.fill is not None and self.query is not None
        first_values = bounds(self._graph_module, mask, first=True)
        added = max(self.fill, torch.finfo(_dtype(self.query)).min)
        if self.fill <= _HIDES and first_values == ((1, 1) if self.keeps_true else (0, 0)):
            self.fill = None
        elif self.fill == -math.inf:
            return f"the mask {mask.name} may hide a whole row by minus infinity"
        elif added > _ABSORBS:
            return f"the mask {mask.name} may hide a whole row by {self.fill}, which does not absorb the scores"
        else:
            self.fill = added
        return None


def _find_shape_problem(inputs: list[Node]) -> str | None:
    shapes = [node.meta["val"].shape for node in inputs]
    if len(shapes[0]) not in (3, 4) or len({len(shape) for shape in shapes}) > 1:
        return "the queries, keys and values do not all have three or four axes"
    if not (modules.is_fixed(shapes[0][-1]) and modules.is_fixed(shapes[2][-1])):
        return "the head size is not fixed"
    for sizes in zip(*(shape[:-2] for shape in shapes), strict=True):
        if not all(statically_known_true(sizes[0] == size) for size in sizes[1:]):
            return "the queries, keys and values differ in their leading sizes"
    return None


def _find_dtype_problem(chain: list[Node], inputs: list[Node]) -> str | None:
    dtype = _dtype(inputs[-1])
    if {_dtype(node) for node in (*inputs, chain[0], chain[-1])} != {dtype} or not dtype.is_floating_point:
        return "the queries, keys and values differ in dtype"
    wide = torch.promote_types(dtype, torch.float32)
    for cast_dtype in {_dtype(node) for node in chain} - {dtype, wide}:
        wider = torch.promote_types(cast_dtype, wide) == cast_dtype
        return f"the attention scores are cast to a {'wider' if wider else 'narrower'} dtype"
    return None


def _find_mask_shape_problem(chain: list[Node], inputs: list[Node]) -> str | None:
    for node in chain[1:]:
        sizes = zip(node.meta["val"].shape, chain[-1].meta["val"].shape, strict=False)
        if modules.dims(node) != modules.dims(inputs[0]) or not all(statically_known_true(a == b) for a, b in sizes):
            return "the mask has more rows than the scores"
    return None


def _cast_source(node: Node) -> Node | None:
    """Returns the input of a cast to a floating-point dtype."""
    value = node.meta.get("val")
    if node.target not in _CASTS or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def _transpose_source(node: Node) -> Node | None:
    """Returns the input of a node that transposes the last two axes."""
    source = node.args[0] if node.args else None
    rank = modules.dims(source) if isinstance(source, Node) else None
    if not isinstance(source, Node) or rank is None or rank < 2:
        return None
    axes: Any = node.args[1:]
    transposes = node.target is aten.mT.default
    if node.target is aten.transpose.int:
        transposes = {axis % rank for axis in axes} == {rank - 2, rank - 1}
    elif node.target is aten.permute.default:
        transposes = [axis % rank for axis in axes[0]] == [*range(rank - 2), rank - 1, rank - 2]
    return source if transposes else None


def _find_factor(graph_module: GraphModule, node: Node) -> tuple[Node, float] | None:
    """Returns the tensor and the constant number that a node multiplies."""
    if node.target not in _FACTORS or len(node.args) != 2:
        return None
    if node.kwargs or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    divides = node.target in (operator.truediv, aten.div_.Tensor)
    for x, factor in (node.args, node.args[::-1])[: 1 if divides or node.target is aten.mul_.Tensor else 2]:
        number = _find_number(graph_module, factor)
        if isinstance(x, Node) and number is not None and isinstance(x.meta.get("val"), torch.Tensor):
            return (x, (1 / number if number else math.inf) if divides else number)
    return None


def _find_tensor_factor(graph_module: GraphModule, node: Node) -> Node | None:
    """Returns the tensor that a node multiplies or divides scores by."""
    if node.target not in _FACTORS or len(node.args) != 2 or not all(isinstance(arg, Node) for arg in node.args):
        return None
    a, b = cast(tuple[Node, Node], node.args)
    if _comes_from_product(graph_module, a):
        return b
    return a if node.target is operator.mul and _comes_from_product(graph_module, b) else None


def _find_number(graph_module: GraphModule, value: Any) -> float | None:
    if type(value) in (int, float):
        return float(value) if math.isfinite(value) else None
    tensor = memory.find_constant(graph_module, value)
    if tensor is None or tensor.dim() or tensor.is_complex() or not bool(tensor.isfinite()):
        return None
    return float(tensor)


class _Masking(NamedTuple):
    """Masked scores and their mask. `fill` is None if the mask is added."""

    scores: Node
    mask: Node
    keeps_true: bool
    fill: float | None


def _find_masking(graph_module: GraphModule, node: Node, depth: int = 0) -> _Masking | None:
    args: tuple[Any, ...] = node.args
    match node.target:
        case operator.add | aten.add_.Tensor if not node.kwargs and len(args) == 2:
            # The operand that comes from a product is the scores.
            for x, mask in (args, args[::-1])[: 1 if node.target is aten.add_.Tensor else 2]:
                if isinstance(mask, Node) and isinstance(x, Node) and _comes_from_product(graph_module, x, depth):
                    return _Masking(x, mask, True, None)
            return None
        case aten.masked_fill.Scalar | aten.masked_fill_.Scalar | aten.masked_fill.Tensor:
            x, mask, fill, keeps_true = *args, False
        case aten.where.ScalarOther | aten.where.self:
            mask, x, fill, keeps_true = *args, True
            if not (isinstance(x, Node) and _comes_from_product(graph_module, x, depth)):
                x, fill, keeps_true = fill, x, False
        case aten.where.ScalarSelf:
            mask, fill, x, keeps_true = *args, False
        case _:
            return None
    if not isinstance(x, Node):  # both branches of the where are numbers, so neither are scores
        return None
    number = fill if type(fill) in (int, float) else _find_fill(graph_module, fill)
    if number is None or math.isnan(number) or not isinstance(mask, Node) or _dtype(mask) is not torch.bool:
        return None
    return _Masking(x, mask, keeps_true, number)


def _find_fill(graph_module: GraphModule, value: Any) -> float | None:
    values = bounds(graph_module, value) if isinstance(value, Node) else None
    return values[0] if values and values[0] == values[1] else None


def _comes_from_product(graph_module: GraphModule, node: Node, depth: int = 0) -> bool:
    if node.target in _PRODUCTS or depth == _MAX_DEPTH:
        return node.target in _PRODUCTS
    factor, source = _find_factor(graph_module, node), _cast_source(node)
    if factor is None and source is None:
        masking = _find_masking(graph_module, node, depth + 1)
        return masking is not None and _comes_from_product(graph_module, masking.scores, depth + 1)
    return _comes_from_product(graph_module, factor[0] if factor else source, depth + 1)  # type: ignore[arg-type]


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
