"""Operations that compute every position along an axis independently."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport._utils import aten_ops
from optexport.transformations.analysis import effects, modules

aten = torch.ops.aten

Feeds = dict[Node, int] | None

_ELEMENT_WISE = {
    *(aten.contiguous.default, aten.clone.default, aten.alias.default, aten.to.dtype, aten._to_copy.default),
    *(operator.add, operator.sub, operator.mul, operator.truediv),
}


def feeds(graph_module: GraphModule, node: Node, axis: int, *, whole: bool = True) -> dict[Node, int] | None:
    """Returns the inputs that one position of a node's result reads at that position only.

    For ``y = linear(x)`` and axis 1, the result is ``{x: 1}``, because ``y[:, i]`` depends on ``x[:, i]`` alone.

    Args:
        graph_module: The graph of the node.
        node: The node.
        axis: The axis of the position in the result, counted from 0.
        whole: True if the inputs have as many positions as the result has now.

    Returns:
        The axis of the position in each such input. None if other positions are read too, or if nothing is known.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or effects.mutated_inputs(graph_module, node):
        return None
    if any(not isinstance(source.meta.get("val"), torch.Tensor) for source in _tensors(node)):
        return None
    if node.op == "call_module":
        return _of_module(graph_module, node, axis, value.dim())
    return _of_operator(_Call(node, axis, value, whole)) if node.op == "call_function" else None


def _of_module(graph_module: GraphModule, node: Node, axis: int, rank: int) -> Feeds:
    module, x = modules.called_module(graph_module, node), modules.sole_input(node)
    if module is None or x is None or modules.has_hooks(module):
        return None
    if type(module) not in (nn.Linear, nn.LayerNorm, nn.Embedding):
        return None
    features = len(module.normalized_shape) if isinstance(module, nn.LayerNorm) else 1
    return {x: axis} if axis < rank - features else None


@dataclass(frozen=True)
class _Call:
    """A call of an operator, and the axis of a position in its result."""

    node: Node
    axis: int
    value: torch.Tensor
    whole: bool

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    @property
    def rank(self) -> int:
        return self.value.dim()

    def argument(self, index: int, default: Any) -> Any:
        return self.args[index] if len(self.args) > index else default

    def same_axis(self, condition: bool) -> Feeds:
        """Returns the first argument with the axis of the result, if a condition is fulfilled."""
        return {self.args[0]: self.axis} if condition and isinstance(self.args[0], Node) else None


def _of_operator(call: _Call) -> Feeds:
    target: Any = call.node.target
    if target in _ELEMENT_WISE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return _broadcast(_tensors(call.node), call)
    return _OPERATORS[target](call) if target in _OPERATORS else None


def _of_dropout(call: _Call) -> Feeds:
    return call.same_axis(call.args[2] is False)


def _of_softmax(call: _Call) -> Feeds:
    return call.same_axis(call.args[1] % call.rank != call.axis)


def _of_mean(call: _Call) -> Feeds:
    keepdim = call.argument(2, call.node.kwargs.get("keepdim"))
    axes = call.args[1]
    return call.same_axis(bool(axes and keepdim) and call.axis not in [axis % call.rank for axis in axes])


def _of_transpose(call: _Call) -> Feeds:
    a, b = call.args[1] % call.rank, call.args[2] % call.rank
    return {call.args[0]: {a: b, b: a}.get(call.axis, call.axis)}


def _of_view(call: _Call) -> Feeds:
    """A view keeps an axis if the sizes up to it stay the same."""
    sizes = call.args[0].meta["val"].shape[: call.axis + 1]
    compared = call.axis + 1 if call.whole else call.axis
    pairs = zip(sizes[:compared], call.value.shape, strict=False)
    return call.same_axis(len(sizes) > call.axis and all(_is_equal(a, b) for a, b in pairs))


def _of_slice(call: _Call) -> Feeds:
    dim, start, end, step = (call.argument(index, default) for index, default in ((1, 0), (2, None), (3, None), (4, 1)))
    is_whole = start in (0, None) and (end is None or end == sys.maxsize) and step == 1
    return call.same_axis(is_whole or dim % call.rank != call.axis)


def _of_getitem(call: _Call) -> Feeds:
    """An index ``[..., i]`` reads the last axis only."""
    index = call.args[1]
    if not isinstance(index, tuple):
        return None
    return call.same_axis(len(index) == 2 and index[0] is Ellipsis and call.axis < call.rank - 1)


def _of_cat(call: _Call) -> Feeds:
    parts = call.args[0]
    # An empty part may have a single axis, even if the others have more.
    same_rank = all(modules.dims(part) == call.rank for part in parts)
    return dict.fromkeys(parts, call.axis) if same_rank and call.argument(1, 0) % call.rank != call.axis else None


def _of_matmul(call: _Call) -> Feeds:
    """The rows of the first factor are independent; the rows of the second are not."""
    x = call.args[0]
    is_row = call.axis == call.rank - 2 == x.meta["val"].dim() - 2
    return call.same_axis(is_row and x is not call.args[1])


def _of_attention(call: _Call) -> Feeds:
    """Queries are independent, except for a causal mask, which depends on their positions."""
    arguments = aten_ops.arguments(call.node)
    query, mask = arguments["query"], arguments["attn_mask"]
    if call.axis != call.rank - 2 or arguments["dropout_p"] or arguments["is_causal"]:
        return None
    if query in (arguments["key"], arguments["value"], mask):
        return None
    masks = _broadcast([mask], call) if isinstance(mask, Node) else {}
    return None if masks is None else {query: call.axis, **masks}


_OPERATORS: dict[Any, Callable[[_Call], Feeds]] = {
    aten.dropout.default: _of_dropout,
    aten.softmax.int: _of_softmax,
    aten._softmax.default: _of_softmax,
    aten.mean.dim: _of_mean,
    aten.transpose.int: _of_transpose,
    aten.view.default: _of_view,
    aten.reshape.default: _of_view,
    aten.slice.Tensor: _of_slice,
    operator.getitem: _of_getitem,
    aten.cat.default: _of_cat,
    aten.matmul.default: _of_matmul,
    aten.scaled_dot_product_attention.default: _of_attention,
}


def _broadcast(sources: Iterable[Node], call: _Call) -> Feeds:
    """Returns the axis of a position in each operand that is not broadcast along it."""
    result = {}
    for source in sources:
        shape = source.meta["val"].shape
        axis = call.axis - (call.rank - len(shape))
        if axis < 0 or (type(shape[axis]) is int and shape[axis] == 1):
            continue
        if call.whole and not _is_equal(shape[axis], call.value.shape[call.axis]):
            return None
        result[source] = axis
    return result


def _tensors(node: Node) -> list[Node]:
    """Returns the inputs of a node that are not known to be numbers."""
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat | int)]


def _is_equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)
