"""Which global state, as of gradients or autocast, each node of a graph runs in.

``torch.export`` keeps such regions as graphs of their own; other graphs switch the state between two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node

from optexport.transformations.analysis import modules, usage


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
        name = modules.operator_name(switch)
        if name.startswith("lazy_load_"):  # which leaves results as they are
            continue
        ended = [other for other in found if other in switch.all_input_nodes]  # an exit is given what its enter gave
        if "decrement" in name:  # and of these there is nothing to give
            begun = name.replace("decrement", "increment")
            ended = [other for other in found if modules.operator_name(other) == begun][-1:]
        sets = "set_" in name and [other for other in found if _setting(other) == _setting(switch)]
        found = [other for other in found if other not in (sets or ended)]
        found += [] if ended else [switch]
    return found


def _setting(switch: Node) -> tuple[Any, str]:
    """What is set, as the autocast of one device, without what it is set to."""
    return switch.target, str([*switch.args, *switch.kwargs.values()][:-1])
