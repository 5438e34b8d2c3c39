"""Which global state, as of gradients or autocast, each node of a graph runs in.

``torch.export`` keeps such regions as graphs of their own; other graphs switch the state between two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node

from optexport.transformations import modules, usage


def why_apart(graph_module: GraphModule, nodes: Iterable[Node]) -> str | None:
    """Why work of one of these nodes cannot be done at another: it runs in another state; None if all run in one."""
    if not usage.uses(graph_module).switches:
        return None
    one, *others = nodes
    for other in others:
        if _state(graph_module, other) != _state(graph_module, one):
            return f"the grad mode, autocast or another global state changes between {one.name} and {other.name}"
    return None


def casts(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node may run under autocast, where what a layer gives is of another dtype than its weights."""
    switched = (switch for switch in _in_force(graph_module, node) if "autocast" in modules.operator_name(switch))
    return any(switch.args[2:3] != (False,) for switch in switched)


def _state(graph_module: GraphModule, node: Node) -> list[Any]:
    return [(switch.target, str(switch.args), str(switch.kwargs)) for switch in _in_force(graph_module, node)]


def _in_force(graph_module: GraphModule, node: Node) -> list[Node]:
    """What was switched before a node, and neither switched back nor set anew."""
    found: list[Node] = []
    for switch in usage.uses(graph_module).switches:
        if not switch < node:
            break
        ended = [other for other in found if other in switch.all_input_nodes]  # an exit is given what its enter gave
        sets = "set_" in modules.operator_name(switch)
        found = [other for other in found if other not in ended and not (sets and other.target is switch.target)]
        found += [] if ended else [switch]
    return found
