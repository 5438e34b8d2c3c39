"""Attention that is written out becomes one call."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import effects, modules, usage, written_attention
from optexport.transformations.analysis.written_attention import Attention
from optexport.transformations.rule import Match, Rule, Skip

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseAttention(Rule):
    """softmax(q @ k.T * c + mask) @ v  ->  scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=c)

    The factor may stand before the product too, and be a divisor; the mask may be added, or fill scores with minus
    infinity or a great negative number; casts to float32 around the softmax and a dropout that is off may be there.

    Skips:   what the trace does not know the shape of; weights or scores that are used elsewhere too; a dropout in
             train mode; q, k and v of other than three or four axes, or of different dtypes or leading sizes, or with
             a head size that is not fixed; scores in another dtype than theirs or float32; more than one mask, one
             before the factor, of another dtype, or filled with a number that the scores cannot hold; a mask that may
             hide all positions of a row by minus infinity, where written-out attention gives NaN and the call 0, or by
             a number that does not drown the scores; a factor that is not a positive constant; an input that is changed
             in place in between; a result that is viewed in a shape that only contiguous memory can take, or handed to
             code that is not PyTorch's own.
    Exact:   to rounding, as long as every score is finite, also where it is masked (a NaN that a fill replaced is
             added to now, and a row of minus infinity, which gave NaN, gives 0), and none comes near to those that are
             masked (-1e4 or less). In half precision the call keeps more digits of the scores.
    Inverse: none, because the nodes are gone, and with them their names and places.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        return written_attention.read(graph_module, node)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Attention)
        graph, node, key, mask = graph_module.graph, match.nodes[-1], match.key, match.mask
        dtype = match.query.meta["val"].dtype

        def call(target: Any, *args: Any) -> Node:
            with graph.inserting_before(node):
                new = graph.call_function(target, args)
            new.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
            return new

        if match.swapped:
            key = call(aten.transpose.int, key, -2, -1)
        if mask is not None and match.fill is not None:
            dropped = call(aten.logical_not.default, mask) if match.kept else mask
            mask = call(operator.mul, call(aten.to.dtype, dropped, dtype), match.fill)
        elif mask is not None and not match.kept:
            mask = call(aten.logical_not.default, mask)
        given = [match.query, key, match.value] if mask is None else [match.query, key, match.value, mask]
        attention = node
        if modules.dims(node) == 3:  # which not every runtime takes
            given = [call(aten.unsqueeze.default, each, 1) if modules.dims(each) == 3 else each for each in given]
            with graph.inserting_before(node):
                attention = graph.call_function(aten.scaled_dot_product_attention.default)
            attention.meta["val"] = node.meta["val"].unsqueeze(1)
            node.target, node.args = aten.squeeze.dim, (attention, 1)
        attention.target = aten.scaled_dot_product_attention.default
        attention.args, attention.kwargs = tuple(given), {"scale": match.scale}
        _erase(graph_module, match.nodes[-2])
        return [(attention, None)]


def _erase(graph_module: GraphModule, node: Node) -> None:
    """Takes a node out, and of what it was computed from all that nobody needs any more."""
    if node.users or node.op == "placeholder" or effects.draws(graph_module, node):
        return
    if node.op == "get_attr":
        usage.forget(graph_module, node)
        return
    sources = node.all_input_nodes
    graph_module.graph.erase_node(node)
    for source in sources:
        _erase(graph_module, source)
