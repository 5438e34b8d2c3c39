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
    earlier = {node.name: node for node in before.graph.nodes}
    later = {node.name: node for node in after.graph.nodes}
    candidates: dict[fx.Node, set[str]] = {}
    for name, node in earlier.items():
        if name in later and name not in changed:
            earlier_inputs, later_inputs = _inputs(node), _inputs(later[name])
            if len(earlier_inputs) == len(later_inputs):
                for earlier_input, later_input in zip(earlier_inputs, later_inputs, strict=True):
                    candidates.setdefault(later_input, set()).add(earlier_input.name)
    names: dict[fx.Node, str] = {}
    for name, node in later.items():
        matches = candidates.get(node, set() if name in changed else {name})
        if name not in matches and node.op not in ("placeholder", "output"):
            names[node] = next(iter(matches)) if len(matches) == 1 else f"{name}_changed"
    taken = {name for name, node in later.items() if node not in names}
    for node, name in names.items():
        if name not in taken:
            taken.add(name)
            node.name = name


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a node in argument order, with repetitions."""
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), inputs.append)
    return inputs
