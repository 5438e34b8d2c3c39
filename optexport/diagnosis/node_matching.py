"""Which node of a transformed graph stands for which of the graph before.

A rule may keep a node and change what it computes: of a convolution that takes a batch norm in, the name stays, and its
value is the norm's from then on. What a node stands for is known by who reads it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def name_alike(before: fx.GraphModule, after: fx.GraphModule, changed: Collection[str]) -> None:
    """Names, in place, the nodes of the graph after a rule by what they stand for in the graph before it.

    A node that was changed, and that nothing reads that was not, bears no name of the graph before.

    Args:
        changed: The names of the nodes that the rule put there, changed or took away.
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
    """What a node reads, in the order of its arguments, as often as it does."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
