"""Groups equal changes of each rule, and selects the parts of the graphs to draw."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optexport.bundle.manifest import ChangeRecord, Manifest, TransformationRecord
from optexport.report.html.graph_text import Graph, GraphNode, read_graph

# These limits hold the page below two megabytes for every model. The page says how many changes it leaves out.
MAX_DRAWN = 40
MAX_DRAWN_PER_RULE = 12
MAX_LISTED = 100
_MAX_CHANGED_NODES = 16
_MAX_NEIGHBOURS = 10

_Change = tuple[int, ChangeRecord]


@dataclass(frozen=True)
class ShownNode:
    """A drawn node; ``changed`` is False for neighbors of the change."""

    node: GraphNode
    changed: bool


@dataclass(frozen=True)
class View:
    """A part of a graph.

    Attributes:
        nodes: Nodes to draw.
        omitted: Number of changed nodes and neighbors that are not drawn.
    """

    nodes: tuple[ShownNode, ...]
    omitted: int

    @property
    def changed(self) -> list[str]:
        """Names of the changed nodes."""
        return [shown.node.name for shown in self.nodes if shown.changed]


@dataclass(frozen=True)
class Group:
    """Changes of one rule that differ only in the numbers within names.

    Attributes:
        members: All changes of the group.
        before: Part of the traced graph around the first change; None if it is not drawn.
        after: The same part of the exported graph.
        other_rules: Other rules that changed the same nodes; the drawings show their changes too.
    """

    members: tuple[ChangeRecord, ...]
    before: View | None
    after: View | None
    other_rules: tuple[str, ...]


@dataclass(frozen=True)
class RuleChanges:
    """Changes of one rule in one graph."""

    rule: TransformationRecord
    groups: tuple[Group, ...]
    not_drawn: int

    @property
    def count(self) -> int:
        """Number of changes."""
        return len(self.rule.changes)


def read_changes(folder: Path, manifest: Manifest) -> list[RuleChanges]:
    """Returns the changes of each rule of a bundle, in the order of application."""
    before = _read_graph(folder, manifest, "graph_before.txt")
    changes, drawn = [], 0
    for _, after, rules in graphs_after(folder, manifest):
        history = _History(before, after, rules)
        for index, rule in enumerate(rules):
            groups = history.groups(index)
            room = min(MAX_DRAWN - drawn, MAX_DRAWN_PER_RULE)
            drawn += min(room, len(groups))
            limited = [group if position < room else replace(group, before=None, after=None)
                       for position, group in enumerate(groups)]  # fmt: skip
            changes.append(RuleChanges(rule, tuple(limited), max(0, len(groups) - room)))
    return changes


def graphs_after(
    folder: Path, manifest: Manifest
) -> Iterator[tuple[tuple[str, ...], Graph, list[TransformationRecord]]]:
    """Yields the exported graphs of a bundle: their formats, none if all formats share one, and their rules."""
    variants: dict[tuple[str, ...], list[TransformationRecord]] = {}
    for rule in manifest.transformations:
        variants.setdefault(tuple(rule.formats), []).append(rule)
    for formats, rules in (variants or {(): []}).items():
        name = f"graph_after{'.' if formats else ''}{'-'.join(formats)}.txt"
        yield formats, _read_graph(folder, manifest, name), rules


def _read_graph(folder: Path, manifest: Manifest, name: str) -> Graph:
    return read_graph(folder / name) if any(file.path == name for file in manifest.files) else Graph("")


class _History:
    """The rules between two graphs; follows names through the changes of other rules."""

    def __init__(self, before: Graph, after: Graph, rules: Sequence[TransformationRecord]) -> None:
        self._before, self._after = before, after
        self._rules = rules
        # By a node's name: the changes that added or removed it, each with the index of its rule.
        self._added: dict[str, list[_Change]] = {}
        self._removed: dict[str, list[_Change]] = {}
        for index, rule in enumerate(rules):
            for change in rule.changes:
                for name in change.nodes:
                    self._added.setdefault(name, []).append((index, change))
                for name in change.replaced:
                    self._removed.setdefault(name, []).append((index, change))

    def groups(self, index: int) -> list[Group]:
        """Returns the changes of a rule, grouped by equal drawings, numbers in names aside.

        The groups are in the order of their first changes.
        """
        members: dict[object, list[ChangeRecord]] = {}
        first_views: dict[object, tuple[View, View]] = {}
        for change in self._rules[index].changes:
            views = self._views(index, change)
            key = tuple(map(_shape, views))
            members.setdefault(key, []).append(change)
            first_views.setdefault(key, views)
        return [Group(tuple(changes), *first_views[key], self._other_rules(index, changes[0]))
                for key, changes in members.items()]  # fmt: skip

    def _views(self, index: int, change: ChangeRecord) -> tuple[View, View]:
        before, after = self._before, self._after
        removed = self._resolve(change.replaced, self._added, before, range(index))
        names, later_rules = [*change.nodes, *change.replaced], range(index + 1, len(self._rules))
        added = self._resolve(names, self._removed, after, later_rules)
        neighbours = dict.fromkeys([*_neighbours(before, removed), *_neighbours(after, added)])
        return _view(before, removed, neighbours), _view(after, added, neighbours)

    def _resolve(
        self, names: Sequence[str], changes: dict[str, list[_Change]], graph: Graph, rules: range
    ) -> list[str]:
        """Returns the nodes that names refer to, following nodes that rules added or replaced."""
        nodes: set[str] = set()
        waiting, visited = list(names), set(names)
        while waiting:
            name = waiting.pop()
            if name in graph.nodes:
                nodes.add(name)
                continue
            for index, change in changes.get(name, ()):
                if index in rules:
                    successors = change.replaced if changes is self._added else change.nodes
                    waiting += [successor for successor in successors if successor not in visited]
                    visited.update(successors)
        return graph.in_order(nodes)

    def _other_rules(self, index: int, change: ChangeRecord) -> tuple[str, ...]:
        names = [*change.nodes, *change.replaced]
        rules = {rule for name in names for table in (self._added, self._removed) for rule, _ in table.get(name, ())}
        return tuple(self._rules[rule].rule for rule in sorted(rules - {index}))


def _neighbours(graph: Graph, names: Sequence[str]) -> list[str]:
    """Returns the inputs and users of nodes."""
    inputs = [source for name in names for source in graph.nodes[name].inputs]
    users = [user for name in names for user in graph.users[name]]
    return [name for name in dict.fromkeys([*inputs, *users]) if name not in names]


def _view(graph: Graph, changed: Sequence[str], neighbours: Iterable[str]) -> View:
    present = [name for name in neighbours if name in graph.nodes and name not in changed]
    drawn = {*changed[:_MAX_CHANGED_NODES], *present[:_MAX_NEIGHBOURS]}
    nodes = tuple(ShownNode(graph.nodes[name], name in changed) for name in graph.in_order(drawn))
    return View(nodes, len(changed) + len(present) - len(drawn))


def _shape(view: View) -> object:
    """Returns a key that is equal for views that differ only in the numbers within names."""
    positions = {shown.node.name: position for position, shown in enumerate(view.nodes)}
    return view.omitted, tuple(
        (
            shown.node.op,
            re.sub(r"\d+", "#", shown.node.target),
            shown.changed,
            tuple(positions[name] for name in shown.node.inputs if name in positions),
        )
        for shown in view.nodes
    )
