"""Puts what a model computes with gradients on in the place of the call that switches them: it computes the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_SWITCH = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_switches(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """Inlines each graph that a model runs under ``torch.enable_grad`` or the like; the ONNX exporter takes none.

    Args:
        owner: Has the graphs that are called, by the names that the graph calls them by.
    """
    while switches := graph.find_nodes(op="call_function", target=_SWITCH):  # one may lie in another
        for switch in switches:
            called, *given = switch.args[1:]
            assert isinstance(called, fx.Node)
            body: Any = owner.get_submodule(str(called.target))
            placeholders = body.graph.find_nodes(op="placeholder")
            copies: dict[fx.Node, Any] = dict(zip(placeholders, given, strict=True))
            with graph.inserting_before(switch):
                results: Any = graph.graph_copy(body.graph, copies)
            for node in body.graph.find_nodes(op="get_attr"):
                copies[node].target = f"{called.target}.{node.target}"
            for user in [*switch.users]:
                assert user.target is operator.getitem
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(switch)
