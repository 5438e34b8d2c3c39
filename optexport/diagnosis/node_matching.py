"""Matching of nodes between a graph and its transformed version.

A rule may keep a node's name and change its value. For example, a convolution that absorbs a batch norm then computes
the norm's value. The readers of a node show the original node that it corresponds to.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def align_names(before: fx.GraphModule, after: fx.GraphModule, changed: Collection[str]) -> None:
    """Renames nodes of a transformed graph, in place, after the nodes they correspond to.

    A changed node without unchanged readers gets a name that the earlier graph does not contain.

    Args:
        before: Graph before the rule.
        after: Graph after the rule.
        changed: Names of nodes that the rule added, changed or removed.
    """
    later = {node.name: node for node in after.graph.nodes}
    candidates = _find_candidates(before.graph, after.graph, changed)
    names: dict[fx.Node, str] = {}
    for name, node in later.items():
        matches = candidates[node]
        if name not in matches and node.op not in ("placeholder", "output"):
            names[node] = next(iter(matches)) if len(matches) == 1 else f"{name}_changed"
    taken = {name for name, node in later.items() if node not in names}
    for node, name in names.items():
        if name not in taken:
            taken.add(name)
            node.name = name


def find_counterparts(before: fx.Graph, after: fx.Graph, changed: Collection[str]) -> dict[str, str]:
    """Returns the node of an earlier graph that each node of a later graph corresponds to, by name.

    Nodes without one are left out.

    Args:
        changed: Names of nodes that rules added, changed or removed in between.
    """
    candidates = _find_candidates(before, after, changed)
    # Several candidates have the same value, because unchanged nodes read this node in place of each of them.
    names = {n.name: n.name if n.name in matches else min(matches) for n, matches in candidates.items() if matches}
    earlier = {node.name for node in before.nodes}
    return {name: counterpart for name, counterpart in names.items() if counterpart in earlier}


def _find_candidates(before: fx.Graph, after: fx.Graph, changed: Collection[str]) -> dict[fx.Node, set[str]]:
    """Returns the names of earlier nodes that each later node may correspond to."""
    earlier = {node.name: node for node in before.nodes}
    later = {node.name: node for node in after.nodes}
    candidates: dict[fx.Node, set[str]] = {}
    for name, node in earlier.items():
        if name in later and name not in changed:
            earlier_inputs, later_inputs = _inputs(node), _inputs(later[name])
            if len(earlier_inputs) == len(later_inputs):
                for earlier_input, later_input in zip(earlier_inputs, later_inputs, strict=True):
                    candidates.setdefault(later_input, set()).add(earlier_input.name)
    return {node: candidates.get(node, set() if name in changed else {name}) for name, node in later.items()}


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a node in argument order, with repetitions."""
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), inputs.append)
    return inputs
