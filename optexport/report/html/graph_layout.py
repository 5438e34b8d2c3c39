"""Arranges the nodes of a small graph in layers, and routes the lines between them.

Data flows downwards.

Follows Sugiyama, Tagawa and Toda (1981): layers by longest path, a stand-in for a line in every layer that it crosses,
an order by the mean position of neighbors, and positions as close to the neighbors as the layer allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HEIGHT = 36
_LAYER_GAP = 26
_NODE_GAP = 14
_LINE_WIDTH = 6
_ROUNDS = 8


@dataclass(frozen=True)
class Box:
    """A node's upper left corner and width."""

    x: float
    y: float
    width: float


@dataclass(frozen=True)
class Layout:
    """Boxes by name, and each line as the commands of an SVG path."""

    width: float
    height: float
    boxes: Mapping[str, Box]
    lines: Sequence[str]


class _Slot:
    """A node, or a line where it crosses a layer."""

    def __init__(self, width: float, layer: int) -> None:
        self.width, self.layer, self.x = width, layer, 0.0
        self.above: list[_Slot] = []
        self.below: list[_Slot] = []


def arrange(widths: Mapping[str, float], reads: Mapping[str, Sequence[str]]) -> Layout:
    """Arranges a graph.

    Args:
        widths: Width of each node, in the order of computation.
        reads: Names of the nodes that a node reads; all of them are in ``widths``.
    """
    layer_numbers = _layer_numbers(widths, reads)
    nodes = {name: _Slot(width, layer_numbers[name]) for name, width in widths.items()}
    layers: list[list[_Slot]] = [[] for _ in range(1 + max(layer_numbers.values(), default=0))]
    for slot in nodes.values():
        layers[slot.layer].append(slot)
    lines = _connect(nodes, reads, layers)
    for layer in layers:
        _pack(layer)
    steps: tuple[Callable[[list[_Slot], bool], None], ...] = (_order, _align)
    for step in steps:
        for turn in range(_ROUNDS):
            for layer in layers if turn % 2 == 0 else layers[::-1]:
                step(layer, turn % 2 == 0)
    slots = [slot for layer in layers for slot in layer]
    left = min((slot.x - slot.width / 2 for slot in slots), default=0.0)
    for slot in slots:
        slot.x -= left
    return Layout(
        max((slot.x + slot.width / 2 for slot in slots), default=0.0),
        len(layers) * (HEIGHT + _LAYER_GAP) - _LAYER_GAP,
        {name: Box(round(slot.x - slot.width / 2, 1), _top(slot), slot.width) for name, slot in nodes.items()},
        [_path(line) for line in lines],
    )


def _connect(
    nodes: Mapping[str, _Slot], reads: Mapping[str, Sequence[str]], layers: Sequence[list[_Slot]]
) -> list[list[_Slot]]:
    """Returns the slots of every line, and adds those between its ends to the layers."""
    lines = []
    for name, sources in reads.items():
        for source in sources:
            line = [nodes[source]]
            for depth in range(nodes[source].layer + 1, nodes[name].layer):
                line.append(_Slot(_LINE_WIDTH, depth))
                layers[depth].append(line[-1])
            line.append(nodes[name])
            for upper, lower in itertools.pairwise(line):
                upper.below.append(lower)
                lower.above.append(upper)
            lines.append(line)
    return lines


def _layer_numbers(widths: Mapping[str, float], reads: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Puts each node below its inputs, and a node without inputs above its first user."""
    layers: dict[str, int] = {}
    for name in widths:
        layers[name] = 1 + max((layers[source] for source in reads.get(name, ())), default=-1)
    for name in widths:
        if not reads.get(name):
            users = [layers[user] for user, sources in reads.items() if name in sources]
            layers[name] = max(0, min(users, default=1) - 1)
    return layers


def _pack(layer: Sequence[_Slot]) -> None:
    x = 0.0
    for slot in layer:
        slot.x = x + slot.width / 2
        x += slot.width + _NODE_GAP


def _mean(slots: Sequence[_Slot], default: float) -> float:
    return sum(slot.x for slot in slots) / len(slots) if slots else default


def _order(layer: list[_Slot], down: bool) -> None:
    """Sorts a layer by the mean position of its neighbors, and centers it on them."""
    layer.sort(key=lambda slot: _mean(slot.above if down else slot.below, slot.x))
    _pack(layer)
    neighbours = [neighbour for slot in layer for neighbour in (slot.above if down else slot.below)]
    shift = _mean(neighbours, 0.0) - _mean(layer, 0.0)
    for slot in layer:
        slot.x += shift


def _align(layer: Sequence[_Slot], _down: bool) -> None:
    """Moves each slot toward its neighbors, and resolves overlaps evenly to both sides."""
    targets = [_mean([*slot.above, *slot.below], slot.x) for slot in layer]
    pushed_right, pushed_left = list(targets), list(targets)
    for index in range(1, len(layer)):
        minimum = pushed_right[index - 1] + _min_distance(layer[index - 1], layer[index])
        pushed_right[index] = max(pushed_right[index], minimum)
    for index in range(len(layer) - 2, -1, -1):
        maximum = pushed_left[index + 1] - _min_distance(layer[index], layer[index + 1])
        pushed_left[index] = min(pushed_left[index], maximum)
    for slot, right, left in zip(layer, pushed_right, pushed_left, strict=True):
        slot.x = (right + left) / 2


def _min_distance(left: _Slot, right: _Slot) -> float:
    return (left.width + right.width) / 2 + _NODE_GAP


def _top(slot: _Slot) -> float:
    return float(slot.layer * (HEIGHT + _LAYER_GAP))


def _path(line: Sequence[_Slot]) -> str:
    """Draws a line from its first slot to its last, straight through crossed layers."""
    x, y = line[0].x, _top(line[0]) + HEIGHT
    commands = [f"M{x:.1f} {y:.1f}"]
    for slot in line[1:]:
        top = _top(slot)
        middle = (y + top) / 2
        commands.append(f"C{x:.1f} {middle:.1f} {slot.x:.1f} {middle:.1f} {slot.x:.1f} {top:.1f}")
        x, y = slot.x, top
        if slot is not line[-1]:
            y = top + HEIGHT
            commands.append(f"V{y:.1f}")
    return "".join(commands)
