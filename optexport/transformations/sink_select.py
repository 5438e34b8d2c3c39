"""SinkSelect: computes only the position of a sequence that is used."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.errors import TransformationError
from optexport.transformations.analysis import modules
from optexport.transformations.analysis.row_wise import feeds
from optexport.transformations.rule import Match, ReversibleRule, Skip

aten = torch.ops.aten


@dataclass(frozen=True)
class Region(Match):
    """Nodes that are only needed at one position.

    Attributes:
        nodes: The selections, and then the nodes up to the first that can compute this position alone.
        axes: For each node except the selections, the axis of the position.
        feeds: For each node, the inputs that it reads at the position only, and the axis in them.
        index: The position.
    """

    axes: dict[Node, int]
    feeds: dict[Node, dict[Node, int]]
    index: int


@dataclass(frozen=True)
class SinkSelect(ReversibleRule):
    """Computes only the position that is selected from a result.

    f(x)[:, i]  ->  f(x[:, i : i + 1])[:, 0], for any f that computes every position independently

    For example, if a pooler reads the first position, the last layer computes one row: its queries, its output
    projection, its feed-forward and its norms. Keys and values still need all rows. Results of unknown shape do not
    match.

    Skips:   a result whose other positions are used too, if the rule would save work otherwise.
    Exact:   to rounding (smaller products may be summed in another order).
    Inverse: exact; the nodes stay, and read their whole inputs again.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Region | Skip | None:
        if (selection := _find_selection(node)) is None:
            return None
        source, axis, index = selection
        selections = [user for user in source.users if _find_selection(user) == selection]
        walk = _Walk(graph_module, source, axis, set(selections))
        if not walk.is_worthwhile():
            if walk.blocked is None:
                return None
            blocked, axis, user = walk.blocked
            saves_work = _Walk(graph_module, blocked, axis, set(blocked.users)).is_worthwhile()
            return Skip(f"{user.name} also reads other positions of {blocked.name}") if saves_work else None
        return Region((*reversed(selections), *walk.axes), walk.axes, walk.feeds, index)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Region)
        index, records = match.index, {}
        slices: dict[tuple[Node, int], Node] = {}
        for node in sorted(match.axes):
            axis, new_inputs = match.axes[node], []
            for source, source_axis in match.feeds[node].items():
                if source in match.axes:
                    continue
                if (source, source_axis) not in slices:
                    with graph_module.graph.inserting_before(node):
                        end = sys.maxsize if index == -1 else index + 1
                        piece = graph_module.graph.call_function(aten.slice.Tensor, (source, source_axis, index, end))
                    piece.meta["val"] = _one_position(source.meta["val"], source_axis)
                    slices[source, source_axis] = piece
                node.replace_input_with(source, slices[source, source_axis])
                new_inputs.append(slices[source, source_axis].name)
            records[node] = {"cut": new_inputs, "axis": axis, "size": _set_size(node, axis, 1)}
            node.meta["val"] = _one_position(node.meta["val"], axis)
        for selection in match.nodes[: len(match.nodes) - len(match.axes)]:
            records[selection] = {"index": index}
            selection.args = (*selection.args[:2], 0)
        return [(node, records[node]) for node in match.nodes]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        if "index" in record:
            node.args = (*node.args[:2], record["index"])
            return
        axis = record["axis"]
        by_name = {n.name: n for n in graph_module.graph.nodes}
        pieces = [source for source in node.all_input_nodes if source.name in record["cut"]]
        if len(pieces) < len(record["cut"]) or (isinstance(record["size"], str) and record["size"] not in by_name):
            raise TransformationError(
                f"the inputs of {node.name} were changed afterwards",
                location="SinkSelect",
                hint="Undo it before other rules remove nodes.",
            )
        for piece in pieces:
            uncut = piece.args[0]
            assert isinstance(uncut, Node)
            node.replace_input_with(piece, uncut)
            if not piece.users:
                graph_module.graph.erase_node(piece)
        source, source_axis = next(iter((feeds(graph_module, node, axis, whole=False) or {}).items()))
        value = node.meta["val"]
        size = source.meta["val"].shape[source_axis]
        node.meta["val"] = value.new_empty((*value.shape[:axis], size, *value.shape[axis + 1 :]))
        if record["size"] is not None:
            _set_size(node, axis, by_name.get(record["size"], record["size"]))


class _Walk:
    """Walks up from a result while only one position is needed.

    Attributes:
        axes: The visited nodes, last first, with the axis of the position.
        feeds: For each node, the inputs that it reads at the position only, and the axis in them.
        blocked: The first node with a user that reads other positions, its axis, and that user.
    """

    def __init__(self, graph_module: GraphModule, last: Node, axis: int, selections: set[Node]) -> None:
        self.axes: dict[Node, int] = {}
        self.feeds: dict[Node, dict[Node, int]] = {}
        self.blocked: tuple[Node, int, Node] | None = None
        self._graph_module = graph_module
        axes, ahead = {last: axis}, {last}
        while ahead:
            node = max(ahead)  # so that all its users were visited before
            ahead.remove(node)
            axis = axes[node]
            users = [user for user in node.users if user not in selections and not _reads_other_size(user, axis)]
            node_feeds = feeds(graph_module, node, axis)
            if not node_feeds:
                continue
            if blocking := [user for user in users if self.feeds.get(user, {}).get(node) != axis]:
                self.blocked = self.blocked or (node, axis, blocking[0])
                continue
            self.axes[node], self.feeds[node] = axis, node_feeds
            for source, source_axis in node_feeds.items():
                axes.setdefault(source, source_axis)
                ahead.add(source)

    def is_worthwhile(self) -> bool:
        """Returns True if the nodes include a product.

        Without one, the saving is not worth a slice.
        """
        return any(
            isinstance(modules.called_module(self._graph_module, node), nn.Linear)
            or node.target in (aten.matmul.default, aten.bmm.default, aten.scaled_dot_product_attention.default)
            for node in self.axes
        )


def _find_selection(node: Node) -> tuple[Node, int, int] | None:
    """Returns the source, axis and position of a selection."""
    if node.target is not aten.select.int or node.kwargs:
        return None
    source, axis, index = node.args
    rank = modules.dims(source) if isinstance(source, Node) else None
    if rank is None or type(index) is not int or index < -1:
        return None
    assert isinstance(source, Node) and isinstance(axis, int)
    size = source.meta["val"].shape[axis]
    return None if type(size) is int and size == 1 else (source, axis % rank, index)


def _reads_other_size(node: Node, axis: int) -> bool:
    """Returns True if a node only reads the size of another axis."""
    return node.target is aten.sym_size.int and bool(node.args[1] != axis)


def _one_position(value: torch.Tensor, axis: int) -> torch.Tensor:
    return value.new_empty((*value.shape[:axis], 1, *value.shape[axis + 1 :]))


def _set_size(node: Node, axis: int, size: Any) -> Any:
    """Replaces the size of an axis in the arguments of a view.

    Returns the old size, or the name of its node.
    """
    if node.target not in (aten.view.default, aten.reshape.default):
        return None
    source, sizes = node.args
    before = list(sizes)[axis]  # type: ignore[arg-type]
    node.args = (source, [*list(sizes)[:axis], size, *list(sizes)[axis + 1 :]])  # type: ignore[arg-type]
    return before.name if isinstance(before, Node) else before
