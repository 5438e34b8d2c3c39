"""What a rule is, and the one driver that runs them all: it iterates, marks, counts, reports and undoes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from optexport.errors import TransformationError
from optexport.transformations.base import ReversibleTransformation, Transformation, marks, set_marks
from optexport.transformations.modules import indexed

# How many marks each rule left, kept twice: ``GraphModule.meta`` survives deepcopy, a plain attribute pickling.
_JOURNAL = "_optexport_journal"


@dataclass(frozen=True)
class Match:
    """A place where a rule applies; rules that found out more about it subclass this.

    Attributes:
        nodes: The nodes that will be changed or replaced.
    """

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Skip:
    """A near miss: a place that looks right, and the reason why it is left alone."""

    reason: str


@dataclass(frozen=True)
class Change:
    """One change: the nodes that stand there now (if any), what they call, and the names of those that are gone."""

    nodes: tuple[str, ...]
    target: str
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class NearMiss:
    """One `Skip`, with the node at which it was found."""

    node: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What a transformation did to a graph."""

    changes: tuple[Change, ...]
    near_misses: tuple[NearMiss, ...]


class Rule(Transformation):
    """A transformation that says where it applies and what it puts there; the driver does the rest.

    Subclasses are frozen dataclasses whose fields are their options. Nothing passes from `match` to `rewrite` but the
    `Match`.
    """

    preserves_computation = True

    @abstractmethod
    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        """Whether the rule applies at a node.

        Returns:
            A `Match`; or a `Skip` where it nearly does; or None where the node is none of the rule's business.
        """

    @abstractmethod
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        """Changes the graph at a match.

        Returns:
            The nodes that now stand there, to be marked, each with a record of what `restore` needs (None where the
            rule cannot be undone): plain data, with names in place of nodes and modules. An empty list where nodes
            are only taken away.
        """

    def transform(self, graph_module: GraphModule) -> GraphModule:
        apply(self, graph_module)
        return graph_module


class ReversibleRule(Rule, ReversibleTransformation):
    """A rule that can be undone, exactly: it puts back what it recorded and never inverts arithmetic."""

    @abstractmethod
    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        """Puts back what `rewrite` replaced by ``node``, from the record that it made."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        undo(self, graph_module)
        return graph_module


def run(transformation: Transformation, graph_module: GraphModule) -> tuple[GraphModule, Report]:
    """Applies any transformation, a rule or not, and says what it did.

    Of a transformation that is not a rule, the changes are the nodes that it marked, or else those that differ.
    """
    if isinstance(transformation, Rule):
        report = apply(transformation, graph_module)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module, report
    before = {node.name: node.format_node() for node in graph_module.graph.nodes}
    graph_module = transformation(graph_module)
    changed = transformation.get_transformed_nodes(graph_module) or [
        node for node in graph_module.graph.nodes if before.get(node.name) != node.format_node()
    ]
    return graph_module, Report(tuple(Change((n.name,), target_name(n), (n.name,)) for n in changed), ())


def target_name(node: Node) -> str:
    """What a node calls, as one would write it: ``encoder.layer.0.query``, ``operator.mul``."""
    module, name = getattr(node.target, "__module__", None), getattr(node.target, "__name__", None)
    return f"{module.lstrip('_')}.{name}" if isinstance(module, str) and name else str(node.target)


def apply(rule: Rule, graph_module: GraphModule) -> Report:
    """Applies a rule wherever it matches."""
    changes: list[Change] = []
    near_misses: list[NearMiss] = []
    signature = rule.signature
    step = max((_mark(node, signature)[0] for node in rule.get_transformed_nodes(graph_module)), default=0)
    with indexed(graph_module):
        for node in graph_module.graph.nodes:
            # One node may be the anchor of several matches: the shared input of two groups of linears, say.
            while isinstance(found := rule.match(graph_module, node), Match):
                replaced = tuple(n.name for n in found.nodes)
                rewritten = rule.rewrite(graph_module, found)
                for new, record in rewritten:
                    step += 1
                    set_marks(new, {**marks(new), signature: (step, record)})
                target = target_name(rewritten[0][0]) if rewritten else ""
                changes.append(Change(tuple(n.name for n, _ in rewritten), target, replaced))
                if node._erased:
                    found = None
                    break
            if found is not None and not isinstance(found, Skip):
                raise TransformationError(
                    f"match returned {found!r}", place=type(rule).__name__, mend="Return a Match, a Skip, or None."
                )
            if found is not None:
                near_misses.append(NearMiss(node.name, found.reason))
    _write_journal(graph_module, signature, len(rule.get_transformed_nodes(graph_module)))
    return Report(tuple(changes), tuple(near_misses))


def undo(rule: ReversibleRule, graph_module: GraphModule) -> None:
    """Undoes a rule wherever it was applied, last change first.

    Raises:
        TransformationError: Marks were lost or copied since the rule was applied, so that it cannot be undone.
    """
    signature = rule.signature
    marked = rule.get_transformed_nodes(graph_module)
    expected = _journal(graph_module).get(signature, len(marked))
    if len(marked) != expected:
        raise TransformationError(
            f"{expected} nodes were transformed, and {len(marked)} still bear the mark",
            place=type(rule).__name__,
            mend="Undo it before the graph is pickled, decomposed, or freed of dead code; deepcopy keeps the marks.",
        )
    for node in sorted(marked, key=lambda node: _mark(node, signature)[0], reverse=True):
        _, record = _mark(node, signature)
        if record is not None:
            rule.restore(graph_module, node, record)
        if not node._erased:
            rule.mark_as_restored(node)
    _write_journal(graph_module, signature, 0)


def _mark(node: Node, signature: str) -> tuple[int, Any]:
    """When a rule changed a node, and its record; a mark that somebody set by hand has neither."""
    return marks(node)[signature] or (0, None)


def _journal(graph_module: GraphModule) -> dict[str, int]:
    journal: dict[str, int] = graph_module.meta.get(_JOURNAL) or vars(graph_module).get(_JOURNAL) or {}
    return journal


def _write_journal(graph_module: GraphModule, signature: str, count: int) -> None:
    journal = {**_journal(graph_module), signature: count}
    graph_module.meta[_JOURNAL] = journal
    object.__setattr__(graph_module, _JOURNAL, journal)
