"""Turns a part of a graph into boxes and lines, which a template renders as SVG."""

from __future__ import annotations

from dataclasses import dataclass

from optexport.errors import on_one_line
from optexport.report.change_text import function_name
from optexport.report.html.changes import View
from optexport.report.html.graph_layout import HEIGHT, Box, arrange
from optexport.report.html.graph_text import OUTPUT, GraphNode

_MAX_LABEL = 30
_MAX_LINE = 300
# Width of a letter of the page's monospaced font in pixels, and the padding of a label.
_LETTER = 6.7
_PADDING = 16


@dataclass(frozen=True)
class Node:
    """A drawn node: its box, its operation, its name, and its line in the graph's text."""

    box: Box
    title: str
    name: str
    line: str
    changed: bool


@dataclass(frozen=True)
class Drawing:
    """A drawing in pixels; each line is the commands of an SVG path."""

    width: float
    height: float
    nodes: tuple[Node, ...]
    lines: tuple[str, ...]
    row: int = HEIGHT


def draw(view: View) -> Drawing:
    """Arranges a part of a graph."""
    nodes = {shown.node.name: shown for shown in view.nodes}
    titles = {name: _shorten(_title(shown.node)) for name, shown in nodes.items()}
    widths = {name: _LETTER * max(len(title), len(_shorten(name))) + _PADDING for name, title in titles.items()}
    reads = {name: [source for source in shown.node.inputs if source in nodes] for name, shown in nodes.items()}
    layout = arrange(widths, reads)
    boxes = [
        Node(layout.boxes[name], titles[name], _shorten(name), shown.node.line[:_MAX_LINE], shown.changed)
        for name, shown in nodes.items()
    ]
    return Drawing(round(layout.width, 1), layout.height, tuple(boxes), tuple(layout.lines))


def _title(node: GraphNode) -> str:
    """Returns a node's module, or its operator without the namespace."""
    if node.op == OUTPUT:
        return "results"
    if node.op == "placeholder":
        return f"input {node.target}"
    if node.op == "call_function":
        return function_name(node.target)
    return node.target


def _shorten(text: str) -> str:
    """Shortens a text to a box; keeps both ends, because layers differ at either."""
    text = on_one_line(text)
    return text if len(text) <= _MAX_LABEL else f"{text[:12]}…{text[-17:]}"
