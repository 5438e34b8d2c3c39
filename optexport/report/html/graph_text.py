"""Reads the graphs of a bundle, which are kept as the text that ``torch.fx`` writes, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# %linear : [num_users=1] = call_module[target=out](args = (%reshape_3,), kwargs = {})
_NODE = re.compile(r"\s+%(?P<name>\w+) : .*?= (?P<op>\w+)\[target=(?P<target>.*?)\](?:\((?P<rest>.*)\))?$")
_OUTPUT = re.compile(r"\s+return (?P<rest>.*)$")
OUTPUT = "output"


@dataclass(frozen=True)
class GraphNode:
    """A node: its name, what kind it is of (``call_module``), what it calls, the nodes that it reads, and its line."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    line: str


class Graph:
    """A graph, whose nodes are in the order of their computation.

    Attributes:
        nodes: By name.
        users: The names of the nodes that read a node.
    """

    def __init__(self, text: str) -> None:
        self.nodes: dict[str, GraphNode] = {}
        self.users: dict[str, list[str]] = {}
        for line in text.split("\n"):  # a name may hold what other systems end a line with
            if (node := self._read(line)) is not None:
                self.nodes[node.name] = node
                self.users[node.name] = []
                for name in node.inputs:
                    self.users[name].append(node.name)

        self._places = {name: location for location, name in enumerate(self.nodes)}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names of nodes in the order of their computation."""
        return sorted(names, key=self._places.__getitem__)

    def _read(self, line: str) -> GraphNode | None:
        if (found := _NODE.match(line)) is not None:
            op, target = found["op"], found["target"]
            # A string among the arguments may look like a node; only what was there before can be read.
            names = re.findall(r"%(\w+)", found["rest"] or "")
        elif (found := _OUTPUT.match(line)) is not None:
            op, target = OUTPUT, ""
            names = re.findall(r"\w+", found["rest"])
        else:  # the heading, or a piece of a name that breaks its line
            return None
        name = found["name"] if op != OUTPUT else OUTPUT
        inputs = dict.fromkeys(each for each in names if each in self.nodes and each != name)
        return GraphNode(name, op, target, tuple(inputs), line.strip())


def read_graph(path: Path) -> Graph:
    """Reads ``graph_before.txt`` or a ``graph_after*.txt``."""
    return Graph(path.read_bytes().decode("utf-8", errors="replace"))
