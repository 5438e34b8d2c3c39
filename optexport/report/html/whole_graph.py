"""Selects what to draw of a whole graph: the tensors, without sizes and without lines that cross many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optexport.bundle.manifest import Manifest
from optexport.report.html.changes import ShownNode, View, graphs_after
from optexport.report.html.graph_text import OUTPUT, Graph, GraphNode

MAX_NODES = 400
# Masks and position embeddings are read by every layer; their lines would cover the drawing.
_MAX_LINE_LENGTH = 40


@dataclass(frozen=True)
class WholeGraph:
    """An exported graph.

    Attributes:
        formats: The formats that are written from it; empty if all of them are.
        size: The number of nodes that compute tensors.
        view: Those nodes; None if they are more than `MAX_NODES`.
    """

    formats: tuple[str, ...]
    size: int
    view: View | None


def read_whole_graphs(folder: Path, manifest: Manifest) -> list[WholeGraph]:
    """Returns the exported graphs of a bundle."""
    return [
        _whole_graph(graph, formats, {name for rule in rules for change in rule.changes for name in change.nodes})
        for formats, graph, rules in graphs_after(folder, manifest)
    ]


def _whole_graph(graph: Graph, formats: tuple[str, ...], changed: set[str]) -> WholeGraph:
    nodes = _with_short_lines(_tensor_nodes(graph))
    view = View(tuple(ShownNode(node, node.name in changed) for node in nodes), 0)
    return WholeGraph(formats, len(nodes), view if len(nodes) <= MAX_NODES else None)


def _tensor_nodes(graph: Graph) -> list[GraphNode]:
    """Returns the nodes that compute tensors: no parameters, sizes, computations of sizes only, and checks."""
    sizes: set[str] = set()
    for node in graph.nodes.values():
        is_check = "_assert" in node.target or "sym_constrain" in node.target
        is_size = "sym_size" in node.target or ("operator." in node.target and sizes.issuperset(node.inputs))
        if is_check or (node.op == "call_function" and is_size):
            sizes.add(node.name)
    return [node for node in graph.nodes.values() if node.name not in sizes and node.op != "get_attr"]


def _with_short_lines(nodes: Sequence[GraphNode]) -> list[GraphNode]:
    positions = {node.name: position for position, node in enumerate(nodes)}

    def is_drawn(source: str, node: GraphNode) -> bool:
        near = source in positions and positions[node.name] - positions[source] <= _MAX_LINE_LENGTH
        return near or (node.op == OUTPUT and source in positions)

    return [replace(node, inputs=tuple(source for source in node.inputs if is_drawn(source, node))) for node in nodes]
