"""What a drawing of a part of a graph consists of; the template beside it makes SVG of that."""

from __future__ import annotations

from dataclasses import dataclass

from optexport.errors import on_one_line
from optexport.report.html.changes import View
from optexport.report.html.graph_text import OUTPUT, GraphNode
from optexport.report.html.layout import HEIGHT, Box, arrange

_LONGEST_LABEL = 30
_LONGEST_LINE = 300
# How wide a letter of the page's monospaced font is, at the sizes of the style sheet, and the room beside a label.
_LETTER = 6.7
_MARGIN = 16


@dataclass(frozen=True)
class Node:
    """A node where it is drawn: what it does, what it is called, and its line in the graph's text."""

    box: Box
    title: str
    name: str
    line: str
    changed: bool


@dataclass(frozen=True)
class Drawing:
    """All that is to be drawn, in pixels; each line as the commands of a path."""

    width: float
    height: float
    nodes: tuple[Node, ...]
    lines: tuple[str, ...]
    row: int = HEIGHT


def draw(view: View) -> Drawing:
    """Arranges a part of a graph."""
    shown = {each.node.name: each for each in view.nodes}
    titles = {name: _short(_title(each.node)) for name, each in shown.items()}
    widths = {name: _LETTER * max(len(title), len(_short(name))) + _MARGIN for name, title in titles.items()}
    reads = {name: [source for source in each.node.inputs if source in shown] for name, each in shown.items()}
    found = arrange(widths, reads)
    nodes = [
        Node(found.boxes[name], titles[name], _short(name), each.node.line[:_LONGEST_LINE], each.changed)
        for name, each in shown.items()
    ]
    return Drawing(round(found.width, 1), found.height, tuple(nodes), tuple(found.lines))


def _title(node: GraphNode) -> str:
    """What a node does, as people say it: the module, or the operator without where it comes from."""
    if node.op == OUTPUT:
        return "results"
    if node.op == "placeholder":
        return f"input {node.target}"
    if node.op == "call_function":
        parts = node.target.split(".")
        return parts[3] if node.target.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
    return node.target


def _short(text: str) -> str:
    """A text that fits into a box: of a long one the two ends, as layers of a model differ in both."""
    text = on_one_line(text)
    return text if len(text) <= _LONGEST_LABEL else f"{text[:12]}…{text[-17:]}"
