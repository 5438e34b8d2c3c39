"""FuseAttention: attention that is written as separate operations becomes one call."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations import attention_pattern
from optexport.transformations.analysis import effects, modules, usage
from optexport.transformations.attention_pattern import Attention
from optexport.transformations.rule import Match, Rule, Skip

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseAttention(Rule):
    """Replaces attention that is written as separate operations by one call.

    softmax(q @ k.T * c + mask) @ v  ->  scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=c)

    The scale may come before the product, and may be a divisor. The mask may be added, or fill scores with minus
    infinity or a large negative number. Casts to float32 around the softmax and inactive dropouts are allowed.

    Skips:   unknown shapes; weights or scores with other users; a dropout in train mode; q, k and v that have neither
             three nor four axes, or differ in dtype or leading sizes; a head size that is not fixed; scores in another
             dtype than q or float32; several masks; a mask before the scale, of another dtype, or filled with a number
             that the scores cannot represent; a mask that may hide a whole row by minus infinity (separate operations
             return NaN, the call 0) or by a number that does not absorb the scores; a scale that is not a positive
             constant; an input that is changed in place in between; a result that is viewed in a shape that requires
             contiguous memory, or passed to code that is not PyTorch's own.
    Exact:   to rounding, if all scores are finite, also where they are masked, and no score is close to a masked one
             (-1e4 or less). In half precision, the call rounds scores to more digits.
    Inverse: none, because the nodes are removed, with their names and positions.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        return attention_pattern.find_attention(graph_module, node)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Attention)
        graph, node, key, mask = graph_module.graph, match.nodes[-1], match.key, match.mask
        dtype = match.query.meta["val"].dtype

        def call(target: Any, *args: Any) -> Node:
            with graph.inserting_before(node):
                new = graph.call_function(target, args)
            new.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
            return new

        if match.key_is_transposed:
            key = call(aten.transpose.int, key, -2, -1)
        if mask is not None and match.fill is not None:
            dropped = call(aten.logical_not.default, mask) if match.keeps_true else mask
            mask = call(operator.mul, call(aten.to.dtype, dropped, dtype), match.fill)
        elif mask is not None and not match.keeps_true:
            mask = call(aten.logical_not.default, mask)
        inputs = [match.query, key, match.value] if mask is None else [match.query, key, match.value, mask]
        attention = node
        if modules.dims(node) == 3:  # some runtimes support only four axes
            inputs = [call(aten.unsqueeze.default, x, 1) if modules.dims(x) == 3 else x for x in inputs]
            with graph.inserting_before(node):
                attention = graph.call_function(aten.scaled_dot_product_attention.default)
            attention.meta["val"] = node.meta["val"].unsqueeze(1)
            node.target, node.args = aten.squeeze.dim, (attention, 1)
        attention.target = aten.scaled_dot_product_attention.default
        attention.args, attention.kwargs = tuple(inputs), {"scale": match.scale}
        _erase_unused(graph_module, match.nodes[-2])
        return [(attention, None)]


def _erase_unused(graph_module: GraphModule, node: Node) -> None:
    """Removes a node without users, and all its inputs that then have no users."""
    if node.users or node.op == "placeholder" or effects.draws(graph_module, node):
        return
    if node.op == "get_attr":
        usage.forget(graph_module, node)
        return
    sources = node.all_input_nodes
    graph_module.graph.erase_node(node)
    for source in sources:
        _erase_unused(graph_module, source)
