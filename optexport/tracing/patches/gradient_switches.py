"""Inlines subgraphs under ``torch.enable_grad``, which the ONNX exporter does not support.

TODO-COUNT
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_SWITCH = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_switches(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """Inlines, in place, every subgraph that changes whether gradients are computed.

    Args:
        owner: The module whose submodules are the subgraphs.
    """
    while switches := graph.find_nodes(op="call_function", target=_SWITCH):  # they may be nested
        for switch in switches:
            subgraph, *arguments = switch.args[1:]
            assert isinstance(subgraph, fx.Node)
            body: Any = owner.get_submodule(str(subgraph.target))
            placeholders = body.graph.find_nodes(op="placeholder")
            copies: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
            with graph.inserting_before(switch):
                results: Any = graph.graph_copy(body.graph, copies)
            for node in body.graph.find_nodes(op="get_attr"):
                copies[node].target = f"{subgraph.target}.{node.target}"
            for user in [*switch.users]:
                assert user.target is operator.getitem
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(switch)
