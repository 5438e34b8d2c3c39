"""Global state (for example grad mode or autocast) in which each node of a graph runs.

``torch.export`` stores such regions as inner graphs. Other graphs switch the state between two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node

from optexport.transformations.analysis import modules, usage


def find_mode_problem(graph_module: GraphModule, nodes: Iterable[Node]) -> str | None:
    """Returns why the work of one node cannot move to another: they run in different states.

    None if they do not.
    """
    if not usage.uses(graph_module).switches:
        return None
    first, *rest = nodes
    for node in rest:
        if find_state(graph_module, node) != find_state(graph_module, first):
            return f"the grad mode, autocast or another global state changes between {first.name} and {node.name}"
    return None


def casts(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a node may run under autocast, which changes the dtype of results."""
    active = _active_switches(graph_module, node)
    return any("autocast" in modules.operator_name(s) and s.args[2:3] != (False,) for s in active)


def find_state(graph_module: GraphModule, node: Node) -> list[Any]:
    """Returns what differs from the state in which the graph starts, in a comparable form."""
    return [(switch.target, str(switch.args), str(switch.kwargs)) for switch in _active_switches(graph_module, node)]


def _active_switches(graph_module: GraphModule, node: Node) -> list[Node]:
    """Returns the switches before a node that were neither reverted nor overridden."""
    active: list[Node] = []
    for switch in usage.uses(graph_module).switches:
        if not switch < node:
            break
        name = modules.operator_name(switch)
        if name.startswith("lazy_load_"):  # does not change results
            continue
        ended = [earlier for earlier in active if earlier in switch.all_input_nodes]  # an exit gets its enter's result
        if "decrement" in name:  # has no such argument
            begin = name.replace("decrement", "increment")
            ended = [earlier for earlier in active if modules.operator_name(earlier) == begin][-1:]
        overridden = "set_" in name and [earlier for earlier in active if _setting(earlier) == _setting(switch)]
        active = [earlier for earlier in active if earlier not in (overridden or ended)]
        active += [] if ended else [switch]
    return active


def _setting(switch: Node) -> tuple[Any, str]:
    """Returns what a switch sets (for example autocast of a device), without the value."""
    return switch.target, str([*switch.args, *switch.kwargs.values()][:-1])
