"""Parses the graphs of a bundle, stored as ``torch.fx`` text, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Example: %linear : [num_users=1] = call_module[target=out](args = (%reshape_3,), kwargs = {})
_NODE = re.compile(r"\s+%(?P<name>\w+) : .*?= (?P<op>\w+)\[target=(?P<target>.*?)\](?:\((?P<rest>.*)\))?$")
_OUTPUT = re.compile(r"\s+return (?P<rest>.*)$")
OUTPUT = "output"


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph; ``op`` is a word such as ``call_module``, ``inputs`` are names."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    line: str


class Graph:
    """A graph, with its nodes in the order of computation.

    Attributes:
        nodes: Nodes by name.
        users: Names of the nodes that read a node.
    """

    def __init__(self, text: str) -> None:
        self.nodes: dict[str, GraphNode] = {}
        self.users: dict[str, list[str]] = {}
        for line in text.split("\n"):  # not splitlines: a name may contain other line separators
            if (node := self._parse(line)) is not None:
                self.nodes[node.name] = node
                self.users[node.name] = []
                for name in node.inputs:
                    self.users[name].append(node.name)

        self._positions = {name: position for position, name in enumerate(self.nodes)}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Sorts names of nodes by the order of computation."""
        return sorted(names, key=self._positions.__getitem__)

    def _parse(self, line: str) -> GraphNode | None:
        if (match := _NODE.match(line)) is not None:
            op, target = match["op"], match["target"]
            # A string argument may look like a node, so that only earlier nodes count as inputs below.
            names = re.findall(r"%(\w+)", match["rest"] or "")
        elif (match := _OUTPUT.match(line)) is not None:
            op, target = OUTPUT, ""
            names = re.findall(r"\w+", match["rest"])
        else:  # the heading, or the rest of a name with a line break
            return None
        name = match["name"] if op != OUTPUT else OUTPUT
        inputs = dict.fromkeys(source for source in names if source in self.nodes and source != name)
        return GraphNode(name, op, target, tuple(inputs), line.strip())


def read_graph(path: Path) -> Graph:
    """Reads ``graph_before.txt`` or a ``graph_after*.txt``."""
    return Graph(path.read_bytes().decode("utf-8", errors="replace"))
