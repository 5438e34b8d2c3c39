"""Places the nodes of a small graph in layers, each below all that it reads, and bends the lines between them.

The way of Sugiyama, Tagawa and Toda (1981): layers by the longest path, a stand-in for a line in each layer that it
passes, order by the mean place of neighbours, then places as near to them as the others of the layer leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEIGHT = 36
_LAYER_GAP = 26
_NODE_GAP = 14
_LINE_WIDTH = 6
_ROUNDS = 8


@dataclass(frozen=True)
class Box:
    """Where a node is: its left upper corner and its width."""

    x: float
    y: float
    width: float


@dataclass(frozen=True)
class Layout:
    """A drawing: the boxes by name, and each line as the commands of an SVG path."""

    width: float
    height: float
    boxes: Mapping[str, Box]
    lines: Sequence[str]


class _Place:
    """A node, or a line where it passes a layer."""

    def __init__(self, width: float, layer: int) -> None:
        self.width, self.layer, self.x = width, layer, 0.0
        self.above: list[_Place] = []
        self.below: list[_Place] = []


def arrange(widths: Mapping[str, float], reads: Mapping[str, Sequence[str]]) -> Layout:
    """Arranges a graph.

    Args:
        widths: The width of each node, in the order of computation.
        reads: The nodes that a node reads, all of them among ``widths``.
    """
    layers_of = _layers(widths, reads)
    nodes = {name: _Place(width, layers_of[name]) for name, width in widths.items()}
    layers: list[list[_Place]] = [[] for _ in range(1 + max(layers_of.values(), default=0))]
    for place in nodes.values():
        layers[place.layer].append(place)
    lines = []
    for name, sources in reads.items():
        for source in sources:
            line = [nodes[source]]
            for depth in range(nodes[source].layer + 1, nodes[name].layer):
                line.append(_Place(_LINE_WIDTH, depth))
                layers[depth].append(line[-1])
            line.append(nodes[name])
            for upper, lower in itertools.pairwise(line):
                upper.below.append(lower)
                lower.above.append(upper)
            lines.append(line)
    for layer in layers:
        _pack(layer)
    for turn in range(_ROUNDS):
        for layer in layers if turn % 2 == 0 else layers[::-1]:
            _order(layer, down=turn % 2 == 0)
    for turn in range(_ROUNDS):
        for layer in layers if turn % 2 == 0 else layers[::-1]:
            _settle(layer)
    places = [place for layer in layers for place in layer]
    left = min((place.x - place.width / 2 for place in places), default=0.0)
    for place in places:
        place.x -= left
    return Layout(
        max((place.x + place.width / 2 for place in places), default=0.0),
        len(layers) * (HEIGHT + _LAYER_GAP) - _LAYER_GAP,
        {name: Box(round(p.x - p.width / 2, 1), _top(p), p.width) for name, p in nodes.items()},
        [_path(line) for line in lines],
    )


def _layers(widths: Mapping[str, float], reads: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Each node one below the lowest that it reads; one that reads nothing just above the first that reads it."""
    layers: dict[str, int] = {}
    for name in widths:
        layers[name] = 1 + max((layers[source] for source in reads.get(name, ())), default=-1)
    for name in widths:
        if not reads.get(name):
            users = [layers[user] for user, sources in reads.items() if name in sources]
            layers[name] = max(0, min(users, default=1) - 1)
    return layers


def _pack(layer: Sequence[_Place]) -> None:
    x = 0.0
    for place in layer:
        place.x = x + place.width / 2
        x += place.width + _NODE_GAP


def _mean(places: Sequence[_Place], otherwise: float) -> float:
    return sum(place.x for place in places) / len(places) if places else otherwise


def _order(layer: list[_Place], *, down: bool) -> None:
    layer.sort(key=lambda place: _mean(place.above if down else place.below, place.x))
    _pack(layer)
    middle = _mean([place for each in layer for place in (each.above if down else each.below)], 0.0)
    shift = middle - _mean(layer, 0.0)
    for place in layer:
        place.x += shift


def _settle(layer: Sequence[_Place]) -> None:
    """Moves each place towards its neighbours in other layers: the mean of what pushing to either side gives."""
    wanted = [_mean([*place.above, *place.below], place.x) for place in layer]
    right, left = list(wanted), list(wanted)
    for index in range(1, len(layer)):
        right[index] = max(right[index], right[index - 1] + _apart(layer[index - 1], layer[index]))
    for index in range(len(layer) - 2, -1, -1):
        left[index] = min(left[index], left[index + 1] - _apart(layer[index], layer[index + 1]))
    for place, one, other in zip(layer, right, left, strict=True):
        place.x = (one + other) / 2


def _apart(one: _Place, other: _Place) -> float:
    return (one.width + other.width) / 2 + _NODE_GAP


def _top(place: _Place) -> float:
    return float(place.layer * (HEIGHT + _LAYER_GAP))


def _path(line: Sequence[_Place]) -> str:
    """From the lower edge of the first to the upper edge of the last, straight down beside what it passes."""
    x, y = line[0].x, _top(line[0]) + HEIGHT
    commands = [f"M{x:.1f} {y:.1f}"]
    for place in line[1:]:
        top = _top(place)
        middle = (y + top) / 2
        commands.append(f"C{x:.1f} {middle:.1f} {place.x:.1f} {middle:.1f} {place.x:.1f} {top:.1f}")
        x, y = place.x, top
        if place is not line[-1]:
            y = top + HEIGHT
            commands.append(f"V{y:.1f}")
    return "".join(commands)
