"""Matching of nodes between a graph and its transformed version.

A rule may keep a node's name and change its value. For example, a convolution that absorbs a batch norm then computes
the norm's value. The readers of a node show the original node that it corresponds to.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def name_alike(before: fx.GraphModule, after: fx.GraphModule, changed: Collection[str]) -> None:
    """Renames nodes of a transformed graph, in place, after the nodes they correspond to.

    A changed node without unchanged readers gets a name that the earlier graph does not contain.

    Args:
        before: Graph before the rule.
        after: Graph after the rule.
        changed: Names of nodes that the rule added, changed or removed.
    """
    earlier = {node.name: node for node in before.graph.nodes}
    later = {node.name: node for node in after.graph.nodes}
    stands: dict[fx.Node, set[str]] = {}
    for name, node in earlier.items():
        if name in later and name not in changed:
            mine, theirs = _reads(node), _reads(later[name])
            if len(mine) == len(theirs):
                for one, other in zip(mine, theirs, strict=True):
                    stands.setdefault(other, set()).add(one.name)
    names: dict[fx.Node, str] = {}
    for name, node in later.items():
        found = stands.get(node, set() if name in changed else {name})
        if name not in found and node.op not in ("placeholder", "output"):
            names[node] = next(iter(found)) if len(found) == 1 else f"{name}_changed"
    taken = {name for name, node in later.items() if node not in names}
    for node, name in names.items():
        if name not in taken:
            taken.add(name)
            node.name = name


def _reads(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a node in argument order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
