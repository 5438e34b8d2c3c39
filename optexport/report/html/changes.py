"""Which rule changed which nodes, and what of the graphs to draw around it: equal changes are drawn once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optexport.bundle.manifest import ChangeRecord, Manifest, TransformationRecord
from optexport.report.html.graph_text import Graph, GraphNode, read_graph

# More than these are left out of the page, which says how many. They keep it under two megabytes whatever the model is.
MOST_DRAWN = 40
MOST_DRAWN_OF_A_RULE = 12
MOST_LISTED = 100
_MOST_CHANGED_NODES = 16
_MOST_NODES_AROUND = 10


@dataclass(frozen=True)
class Shown:
    """A node of a drawing: whether the change took it away or put it there, or it only lies beside."""

    node: GraphNode
    changed: bool


@dataclass(frozen=True)
class View:
    """A part of a graph.

    Attributes:
        left_out: How many changed nodes, and nodes around these, are not in it.
    """

    nodes: tuple[Shown, ...]
    left_out: int

    @property
    def changed(self) -> list[str]:
        return [shown.node.name for shown in self.nodes if shown.changed]


@dataclass(frozen=True)
class Group:
    """Changes of one rule that are alike but for the numbers in names.

    Attributes:
        members: All of them.
        before: The traced graph around the first; None where it is not drawn.
        after: The same of the exported graph.
        others: Other rules that changed the same nodes, so that the drawings show what they did too.
    """

    members: tuple[ChangeRecord, ...]
    before: View | None
    after: View | None
    others: tuple[str, ...]


@dataclass(frozen=True)
class RuleChanges:
    """What one rule did to the graph of some files."""

    rule: TransformationRecord
    groups: tuple[Group, ...]
    not_drawn: int

    @property
    def count(self) -> int:
        """How many changes there are."""
        return len(self.rule.changes)


def read_changes(folder: Path, manifest: Manifest) -> list[RuleChanges]:
    """What each rule of a bundle changed, in the order of their application."""
    listed = {file.path for file in manifest.files}

    def graph(name: str) -> Graph:
        return read_graph(folder / name) if name in listed else Graph("")

    before = graph("graph_before.txt")
    variants: dict[tuple[str, ...], list[TransformationRecord]] = {}
    for rule in manifest.transformations:
        variants.setdefault(tuple(rule.formats), []).append(rule)
    found, drawn = [], 0
    for formats, rules in variants.items():
        after = graph(f"graph_after{'.' if formats else ''}{'-'.join(formats)}.txt")
        history = _History(before, after, rules)
        for index, rule in enumerate(rules):
            groups = history.groups(index)
            room = min(MOST_DRAWN - drawn, MOST_DRAWN_OF_A_RULE)
            drawn += min(room, len(groups))
            kept = [group if place < room else replace(group, before=None, after=None)
                    for place, group in enumerate(groups)]  # fmt: skip
            found.append(RuleChanges(rule, tuple(kept), max(0, len(groups) - room)))
    return found


class _History:
    """The rules that led from one graph to another. Names are followed through the changes of other rules."""

    def __init__(self, before: Graph, after: Graph, rules: Sequence[TransformationRecord]) -> None:
        self._before, self._after = before, after
        self._rules = rules
        # By a node's name, the rules that made it or took it away, each with what it put there or took.
        self._made: dict[str, list[tuple[int, ChangeRecord]]] = {}
        self._taken: dict[str, list[tuple[int, ChangeRecord]]] = {}
        for index, rule in enumerate(rules):
            for change in rule.changes:
                for name in change.nodes:
                    self._made.setdefault(name, []).append((index, change))
                for name in change.replaced:
                    self._taken.setdefault(name, []).append((index, change))

    def groups(self, index: int) -> list[Group]:
        """The changes of a rule, those that are alike together, in the order of the first of each."""
        kinds: dict[object, list[ChangeRecord]] = {}
        firsts: dict[object, tuple[View, View]] = {}
        for change in self._rules[index].changes:
            views = self._views(index, change)
            kind = tuple(map(_kind, views))
            kinds.setdefault(kind, []).append(change)
            firsts.setdefault(kind, views)
        return [Group(tuple(members), *firsts[kind], self._others(index, members[0]))
                for kind, members in kinds.items()]  # fmt: skip

    def _views(self, index: int, change: ChangeRecord) -> tuple[View, View]:
        before, after = self._before, self._after
        gone = self._followed(change.replaced, self._made, before, range(index))
        names, later = [*change.nodes, *change.replaced], range(index + 1, len(self._rules))
        there = self._followed(names, self._taken, after, later)
        around = dict.fromkeys([*_around(before, gone), *_around(after, there)])
        return _view(before, gone, around), _view(after, there, around)

    def _followed(
        self, names: Sequence[str], changes: dict[str, list[tuple[int, ChangeRecord]]], graph: Graph, rules: range
    ) -> list[str]:
        """The nodes of a graph that names stand for, which some of the rules may have made or replaced on the way."""
        found: set[str] = set()
        waiting, seen = list(names), set(names)
        while waiting:
            name = waiting.pop()
            if name in graph.nodes:
                found.add(name)
                continue
            for index, change in changes.get(name, ()):
                if index in rules:
                    onward = change.replaced if changes is self._made else change.nodes
                    waiting += [each for each in onward if each not in seen]
                    seen.update(onward)
        return graph.in_order(found)

    def _others(self, index: int, change: ChangeRecord) -> tuple[str, ...]:
        names = [*change.nodes, *change.replaced]
        rules = {other for name in names for table in (self._made, self._taken) for other, _ in table.get(name, ())}
        return tuple(self._rules[other].rule for other in sorted(rules - {index}))


def _around(graph: Graph, names: Sequence[str]) -> list[str]:
    """The nodes that some nodes read, and those that read them."""
    read = [each for name in names for each in graph.nodes[name].inputs]
    users = [each for name in names for each in graph.users[name]]
    return [name for name in dict.fromkeys([*read, *users]) if name not in names]


def _view(graph: Graph, changed: Sequence[str], around: Iterable[str]) -> View:
    beside = [name for name in around if name in graph.nodes and name not in changed]
    kept = {*changed[:_MOST_CHANGED_NODES], *beside[:_MOST_NODES_AROUND]}
    shown = tuple(Shown(graph.nodes[name], name in changed) for name in graph.in_order(kept))
    return View(shown, len(changed) + len(beside) - len(kept))


def _kind(view: View) -> object:
    """What two views have in common that are alike but for the numbers in names."""
    places = {shown.node.name: place for place, shown in enumerate(view.nodes)}
    return view.left_out, tuple(
        (
            shown.node.op,
            re.sub(r"\d+", "#", shown.node.target),
            shown.changed,
            tuple(places[name] for name in shown.node.inputs if name in places),
        )
        for shown in view.nodes
    )
