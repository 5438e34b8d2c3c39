"""Example of your own rule: removes dropout, which returns its input outside of training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations import Match, Rule, Skip

aten = torch.ops.aten


@dataclass(frozen=True)
class DropDropout(Rule):
    """Removes dropout in eval mode.

    dropout(x, p, train=False)  ->  x

    Skips:   dropout in train mode, which draws random numbers.
    Exact:   bit-exact.
    Inverse: none, because the probability is not recorded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.target is not aten.dropout.default:
            return None
        _, _, train = node.args
        return Skip("dropout is in train mode") if train else Match((node,))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (dropout,) = match.nodes
        dropout.replace_all_uses_with(dropout.all_input_nodes[0])
        graph_module.graph.erase_node(dropout)
        return []
