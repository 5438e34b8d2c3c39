"""Where only one position of a sequence is used, the work for all others goes."""

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
    """All that is only needed at one position.

    Attributes:
        nodes: From the selections up to the first node that can be computed at that position alone.
        axes: The axis of the position in each node's result, but for the selections.
        feeds: The inputs of each that are needed at the position alone, and the axis in them.
        index: The position.
    """

    axes: dict[Node, int]
    feeds: dict[Node, dict[Node, int]]
    index: int


@dataclass(frozen=True)
class SinkSelect(ReversibleRule):
    """f(x)[:, i]  ->  f(x[:, i : i + 1])[:, 0], for any f that computes every position by itself

    So a pooler that reads the first position leaves the last layer to compute one row: its queries, its output
    projection, its feed-forward and its norms. Keys and values still need all rows. What the trace does not know the
    shape of is left alone.

    Skips:   a result of which other positions are used too, where work would be saved.
    Exact:   to rounding (smaller products may be summed in another order).
    Inverse: exact; the nodes are kept, and read their whole inputs again.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Region | Skip | None:
        if (found := _selection(node)) is None:
            return None
        source, axis, index = found
        selections = [user for user in source.users if _selection(user) == found]
        walk = _Walk(graph_module, source, axis, set(selections))
        if not walk.worth_it():
            if walk.blocked is None:
                return None
            needed, axis, user = walk.blocked
            saved = _Walk(graph_module, needed, axis, set(needed.users)).worth_it()
            return Skip(f"{user.name} needs other positions of {needed.name} too") if saved else None
        return Region((*reversed(selections), *walk.axes), walk.axes, walk.feeds, index)

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Region)
        index, records = match.index, {}
        cut: dict[tuple[Node, int], Node] = {}
        for node in sorted(match.axes):
            axis, made = match.axes[node], []
            for source, its_axis in match.feeds[node].items():
                if source in match.axes:
                    continue
                if (source, its_axis) not in cut:
                    with graph_module.graph.inserting_before(node):
                        end = sys.maxsize if index == -1 else index + 1
                        piece = graph_module.graph.call_function(aten.slice.Tensor, (source, its_axis, index, end))
                    piece.meta["val"] = _one(source.meta["val"], its_axis)
                    cut[source, its_axis] = piece
                node.replace_input_with(source, cut[source, its_axis])
                made.append(cut[source, its_axis].name)
            records[node] = {"cut": made, "axis": axis, "size": _set_size(node, axis, 1)}
            node.meta["val"] = _one(node.meta["val"], axis)
        for selection in match.nodes[: len(match.nodes) - len(match.axes)]:
            records[selection] = {"index": index}
            selection.args = (*selection.args[:2], 0)
        return [(node, records[node]) for node in match.nodes]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        if "index" in record:
            node.args = (*node.args[:2], record["index"])
            return
        axis = record["axis"]
        by_name = {other.name: other for other in graph_module.graph.nodes}
        pieces = [source for source in node.all_input_nodes if source.name in record["cut"]]
        if len(pieces) < len(record["cut"]) or (isinstance(record["size"], str) and record["size"] not in by_name):
            raise TransformationError(
                f"what {node.name} is computed from was changed since",
                location="SinkSelect",
                hint="Undo it before other rules take nodes away.",
            )
        for piece in pieces:
            whole = piece.args[0]
            assert isinstance(whole, Node)
            node.replace_input_with(piece, whole)
            if not piece.users:
                graph_module.graph.erase_node(piece)
        source, its_axis = next(iter((feeds(graph_module, node, axis, whole=False) or {}).items()))
        value = node.meta["val"]
        size = source.meta["val"].shape[its_axis]
        node.meta["val"] = value.new_empty((*value.shape[:axis], size, *value.shape[axis + 1 :]))
        if record["size"] is not None:
            _set_size(node, axis, by_name.get(record["size"], record["size"]))


class _Walk:
    """Goes up from a result, as far as only one position of it and of what it is made of is needed.

    Attributes:
        axes: The nodes on the way, last first, with the axis of the position in each.
        feeds: The inputs of each that are needed at the position alone, and the axis in them.
        blocked: The first node, its axis, and its user, where another position is needed.
    """

    def __init__(self, graph_module: GraphModule, last: Node, axis: int, selections: set[Node]) -> None:
        self.axes: dict[Node, int] = {}
        self.feeds: dict[Node, dict[Node, int]] = {}
        self.blocked: tuple[Node, int, Node] | None = None
        self._graph_module = graph_module
        wanted, ahead = {last: axis}, {last}
        while ahead:
            node = max(ahead)  # so that all users of a node were seen before it
            ahead.remove(node)
            axis = wanted[node]
            users = [user for user in node.users if user not in selections and not _reads_size(user, axis)]
            its_feeds = feeds(graph_module, node, axis)
            if not its_feeds:
                continue
            if others := [user for user in users if self.feeds.get(user, {}).get(node) != axis]:
                self.blocked = self.blocked or (node, axis, others[0])
                continue
            self.axes[node], self.feeds[node] = axis, its_feeds
            for source, its_axis in its_feeds.items():
                wanted.setdefault(source, its_axis)
                ahead.add(source)

    def worth_it(self) -> bool:
        """Whether there is a product in it; without one, nothing would be saved that is worth a slice."""
        return any(
            isinstance(modules.called_module(self._graph_module, node), nn.Linear)
            or node.target in (aten.matmul.default, aten.bmm.default, aten.scaled_dot_product_attention.default)
            for node in self.axes
        )


def _selection(node: Node) -> tuple[Node, int, int] | None:
    """What is selected from, along which axis, at which position; None where a node is no selection."""
    if node.target is not aten.select.int or node.kwargs:
        return None
    source, axis, index = node.args
    rank = modules.dims(source) if isinstance(source, Node) else None
    if rank is None or type(index) is not int or index < -1:
        return None
    assert isinstance(source, Node) and isinstance(axis, int)
    size = source.meta["val"].shape[axis]
    return None if type(size) is int and size == 1 else (source, axis % rank, index)


def _reads_size(node: Node, axis: int) -> bool:
    """Whether a node only reads the size of another axis."""
    return node.target is aten.sym_size.int and bool(node.args[1] != axis)


def _one(value: torch.Tensor, axis: int) -> torch.Tensor:
    return value.new_empty((*value.shape[:axis], 1, *value.shape[axis + 1 :]))


def _set_size(node: Node, axis: int, size: Any) -> Any:
    """Replaces the size that a view is told along an axis; returns the one before, by name where it is a node's."""
    if node.target not in (aten.view.default, aten.reshape.default):
        return None
    source, sizes = node.args
    before = list(sizes)[axis]  # type: ignore[arg-type]
    node.args = (source, [*list(sizes)[:axis], size, *list(sizes)[axis + 1 :]])  # type: ignore[arg-type]
    return before.name if isinstance(before, Node) else before
