"""What a rule is, and the one driver that runs them all: it iterates, marks, counts, reports and undoes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from optexport.errors import TransformationError
from optexport.transformations.analysis import modes
from optexport.transformations.analysis.snapshot import restored_on_failure
from optexport.transformations.analysis.usage import indexed
from optexport.transformations.base import ReversibleTransformation, Transformation, marks, set_marks

# An attribute of the GraphModule: by signature, the name of each rule that was applied and how many records it left.
_JOURNAL = "_optexport_journal"


@dataclass(frozen=True)
class Match:
    """A place where a rule applies; rules that found out more about it subclass this.

    Attributes:
        nodes: The nodes that will be changed or replaced. Where a global state, as that of autocast, changes between
            two of them, or they are computed by ``torch.vmap``, the driver leaves all as it is.
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


_R = TypeVar("_R", bound=Rule)


class ReversibleRule(Rule, ReversibleTransformation):
    """A rule that can be undone, exactly: it puts back what it recorded and never inverts arithmetic."""

    @abstractmethod
    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        """Puts back what `rewrite` replaced by ``node``, from the record that it made."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        undo([self], graph_module)
        return graph_module


def run(transformation: Transformation, graph_module: GraphModule) -> tuple[GraphModule, Report]:
    """Applies any transformation, a rule or not, and says what it did.

    Of a transformation that is not a rule, the changes are the nodes that it marked, or else those that differ.

    Raises:
        TransformationError: It left a tensor that no copy can be made of.
    """
    if isinstance(transformation, Rule):
        with restored_on_failure(graph_module):
            report = apply(transformation, graph_module)
            graph_module.graph.lint()
            graph_module.recompile()
            _check_leaves(transformation, graph_module)
        return graph_module, report
    before = {node.name: node.format_node() for node in graph_module.graph.nodes}
    graph_module = transformation(graph_module)
    _check_leaves(transformation, graph_module)
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
    step = max((_last_step(node) for node in graph_module.graph.nodes), default=0)
    with indexed(graph_module):
        for node in graph_module.graph.nodes:
            found, last = _match(rule, graph_module, node), None
            # One node may be the anchor of several matches: the shared input of two groups of linears, say.
            while isinstance(found, Match):
                if found == last:
                    raise _wrong(rule, f"match finds {node.name} again after rewrite", "Return None where it is done.")
                replaced = tuple(n.name for n in found.nodes)
                rewritten = rule.rewrite(graph_module, found)
                for new, record in rewritten:
                    step += 1
                    set_marks(new, {**marks(new), signature: (*marks(new).get(signature, ()), (step, record))})
                target = target_name(rewritten[0][0]) if rewritten else ""
                changes.append(Change(tuple(n.name for n, _ in rewritten), target, replaced))
                found, last = None if node._erased else _match(rule, graph_module, node), found
            if isinstance(found, Skip):
                near_misses.append(NearMiss(node.name, found.reason))
            elif found is not None:
                raise _wrong(rule, f"match returned {found!r}", "Return a Match, a Skip, or None.")
    _write_journal(graph_module, rule, len(_records(graph_module, [rule])))
    return Report(tuple(changes), tuple(near_misses))


def _match(rule: Rule, graph_module: GraphModule, node: Node) -> Match | Skip | None:
    """What a rule finds at a node, but nothing that would move work into another global state, as that of autocast, and
    nothing within ``torch.vmap``."""
    found = rule.match(graph_module, node)
    if not isinstance(found, Match):
        return found
    for known in (*found.nodes, *(source for changed in found.nodes for source in changed.all_input_nodes)):
        # Of a batch of torch.vmap, what the trace knows can neither be changed nor made anew outside of it.
        if any(map(_is_batched, torch.utils._pytree.tree_leaves(known.meta.get("val")))):
            return Skip(f"{known.name} is one of many that torch.vmap computes at once")
    reason = modes.why_apart(graph_module, found.nodes)
    return Skip(reason) if reason else found


def _is_batched(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_batchedtensor(value))


def undo(rules: Sequence[ReversibleRule], graph_module: GraphModule) -> None:
    """Undoes rules wherever they were applied, last change first, whichever rule made it.

    Raises:
        TransformationError: A rule was not applied to this graph, as far as anything there tells; marks were lost or
            copied since; or what it left was changed.
    """
    for rule in rules:
        left = len(_records(graph_module, [rule]))
        if not left and rule.signature not in _journal(graph_module):
            raise _wrong(
                rule,
                "nothing in this graph tells that it was applied here with these options",
                "Undo it on the graph that it was applied to, or on a deepcopy; tracing that again loses all marks.",
            )
        _, expected = _journal(graph_module).get(rule.signature, ("", left))
        if left != expected:
            raise _wrong(
                rule,
                f"{expected} nodes were transformed, and {left} still bear the mark",
                "Undo it before the graph is pickled, decomposed, or freed of dead code; deepcopy keeps the marks.",
            )
    for step, node, rule, record in sorted(_records(graph_module, rules), key=lambda r: r[0], reverse=True):
        if _last_step(node) > step:
            raise _wrong(rule, f"{node.name} was changed since by {_last_rule(graph_module, node)}", "Undo that first.")
        rule.restore(graph_module, node, record)
        if not node._erased:
            remaining = marks(node)
            remaining[rule.signature] = remaining[rule.signature][:-1]
            set_marks(node, remaining)
    for rule in rules:
        for node in rule.get_transformed_nodes(graph_module):
            rule.mark_as_restored(node)
        _write_journal(graph_module, rule, 0)


def _check_leaves(rule: Transformation, graph_module: GraphModule) -> None:
    """Raises where a tensor of the model remembers what it was computed from, with which torch copies no module."""
    for name, tensor in (*graph_module.named_parameters(), *graph_module.named_buffers()):
        if not tensor.is_leaf:
            raise _wrong(rule, f"it left {name} with a history of gradients", "Compute weights under torch.no_grad().")


def _wrong(rule: Transformation, cause: str, hint: str) -> TransformationError:
    return TransformationError(cause, location=type(rule).__name__, hint=hint)


def _records(graph_module: GraphModule, rules: Sequence[_R]) -> list[tuple[int, Node, _R, Any]]:
    """The changes that rules made: when, to which node, by which rule, and what it recorded."""
    by_signature = {rule.signature: rule for rule in rules}
    return [
        (step, node, by_signature[signature], record)
        for node in graph_module.graph.nodes
        for signature, records in marks(node).items()
        if signature in by_signature
        for step, record in records
    ]


def _last_step(node: Node) -> int:
    return max((step for records in marks(node).values() for step, _ in records), default=0)


def _last_rule(graph_module: GraphModule, node: Node) -> str:
    steps = {signature: records[-1][0] for signature, records in marks(node).items() if records}
    name, _ = _journal(graph_module).get(max(steps, key=lambda signature: steps[signature]), ("another rule", 0))
    return name


def _journal(graph_module: GraphModule) -> dict[str, tuple[str, int]]:
    journal: dict[str, tuple[str, int]] = vars(graph_module).get(_JOURNAL, {})
    return journal


def _write_journal(graph_module: GraphModule, rule: Rule, count: int) -> None:
    journal = {**_journal(graph_module), rule.signature: (type(rule).__name__, count)}
    object.__setattr__(graph_module, _JOURNAL, journal)
    # Pickling keeps any attribute, and deepcopy those that are named there.
    kept = graph_module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {})
    graph_module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = {**kept, _JOURNAL: journal}
