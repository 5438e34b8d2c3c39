"""`Rule`, the base class of most transformations, and the driver that runs rules.

The driver iterates over the graph, marks and counts changes, reports near misses, and undoes rules.
"""

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

# Attribute of the GraphModule: for each signature, the class name of the applied rule and its number of records.
_JOURNAL = "_optexport_journal"


@dataclass(frozen=True)
class Match:
    """A place where a rule applies. Rules subclass it to pass more information to `rewrite`.

    Attributes:
        nodes: The nodes that will be changed or replaced. The driver skips the match if a global state (for example
            autocast) changes between two of them, or if ``torch.vmap`` computes them.
    """

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Skip:
    """A near miss: the reason why a rule does not apply at a place that nearly matches."""

    reason: str


@dataclass(frozen=True)
class Change:
    """One change of a graph.

    Attributes:
        nodes: Names of the new nodes; empty if nodes were only removed.
        target: What the first new node calls.
        replaced: Names of the nodes that were changed or replaced.
    """

    nodes: tuple[str, ...]
    target: str
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class NearMiss:
    """A `Skip`, with the name of the node where it occurred."""

    node: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The changes that a transformation made, and its near misses."""

    changes: tuple[Change, ...]
    near_misses: tuple[NearMiss, ...]


class Rule(Transformation):
    """A transformation that is defined by where it matches and how it rewrites a match.

    Subclasses are frozen dataclasses; their fields are their options. `match` passes information to `rewrite` only
    through the `Match`.
    """

    preserves_computation = True

    @abstractmethod
    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        """Matches the rule at a node.

        Returns:
            A `Match` if it applies, a `Skip` if it nearly applies, and None for all other nodes.
        """

    @abstractmethod
    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        """Changes the graph at a match.

        Returns:
            The new nodes, each with the record that `restore` needs (None if the rule cannot be undone). A record is
            plain data and refers to nodes and modules by name. The list is empty if nodes were only removed.
        """

    def transform(self, graph_module: GraphModule) -> GraphModule:
        apply(self, graph_module)
        return graph_module


_R = TypeVar("_R", bound=Rule)


class ReversibleRule(Rule, ReversibleTransformation):
    """A rule that can be undone exactly.

    It restores what it recorded and never inverts arithmetic.
    """

    @abstractmethod
    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        """Restores what `rewrite` replaced by ``node``, from the record that `rewrite` returned."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        undo([self], graph_module)
        return graph_module


def run(transformation: Transformation, graph_module: GraphModule) -> tuple[GraphModule, Report]:
    """Applies a transformation and reports what it did.

    For a transformation that is not a rule, the changes are the nodes that it marked. If it marked none, they are the
    nodes that differ.

    Raises:
        TransformationError: The transformation left a tensor that cannot be copied.
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
    """Returns the readable name of a node's target, for example ``operator.mul``."""
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
            result, previous = _match(rule, graph_module, node), None
            # A node may be the anchor of several matches, for example the input of two groups of linears.
            while isinstance(result, Match):
                if result == previous:
                    raise _error(
                        rule, f"match returns the same Match for {node.name} after rewrite", "Return None after it."
                    )
                replaced = tuple(n.name for n in result.nodes)
                rewritten = rule.rewrite(graph_module, result)
                for new, record in rewritten:
                    step += 1
                    set_marks(new, {**marks(new), signature: (*marks(new).get(signature, ()), (step, record))})
                target = target_name(rewritten[0][0]) if rewritten else ""
                changes.append(Change(tuple(n.name for n, _ in rewritten), target, replaced))
                result, previous = None if node._erased else _match(rule, graph_module, node), result
            if isinstance(result, Skip):
                near_misses.append(NearMiss(node.name, result.reason))
            elif result is not None:
                raise _error(rule, f"match returned {result!r}", "Return a Match, a Skip, or None.")
    _write_journal(graph_module, rule, len(_records(graph_module, [rule])))
    return Report(tuple(changes), tuple(near_misses))


def _match(rule: Rule, graph_module: GraphModule, node: Node) -> Match | Skip | None:
    """Calls `match`, and skips matches that span two global states or lie within vmap."""
    result = rule.match(graph_module, node)
    if not isinstance(result, Match):
        return result
    for n in (*result.nodes, *(source for changed in result.nodes for source in changed.all_input_nodes)):
        # Values that torch.vmap batches cannot be changed or created outside of it.
        if any(map(_is_batched, torch.utils._pytree.tree_leaves(n.meta.get("val")))):
            return Skip(f"{n.name} is batched by torch.vmap")
    reason = modes.find_mode_problem(graph_module, result.nodes)
    return Skip(reason) if reason else result


def _is_batched(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_batchedtensor(value))


def undo(rules: Sequence[ReversibleRule], graph_module: GraphModule) -> None:
    """Undoes all changes of some rules, last change first.

    Raises:
        TransformationError: A rule was not applied to this graph, marks were lost or copied, or another rule
            changed the nodes afterwards.
    """
    for rule in rules:
        marked = len(_records(graph_module, [rule]))
        if not marked and rule.signature not in _journal(graph_module):
            raise _error(
                rule,
                "the rule was not applied to this graph with these options, or its marks were lost",
                "Undo it on the graph that it was applied to, or on a deepcopy; tracing the graph again loses all"
                " marks.",
            )
        _, expected = _journal(graph_module).get(rule.signature, ("", marked))
        if marked != expected:
            raise _error(
                rule,
                f"the number of marked nodes changed (expected {expected}, found {marked})",
                "Undo it before pickling, decomposing or eliminating dead code; deepcopy keeps the marks.",
            )
    for step, node, rule, record in sorted(_records(graph_module, rules), key=lambda r: r[0], reverse=True):
        if _last_step(node) > step:
            last_rule = _last_rule(graph_module, node)
            raise _error(rule, f"{node.name} was changed afterwards by {last_rule}", f"Undo {last_rule} first.")
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
    """Raises an error for a tensor that is not a leaf, which torch cannot deepcopy."""
    for name, tensor in (*graph_module.named_parameters(), *graph_module.named_buffers()):
        if not tensor.is_leaf:
            raise _error(
                rule, f"the rule left {name} with a gradient history", "Compute weights under torch.no_grad()."
            )


def _error(rule: Transformation, message: str, hint: str) -> TransformationError:
    return TransformationError(message, location=type(rule).__name__, hint=hint)


def _records(graph_module: GraphModule, rules: Sequence[_R]) -> list[tuple[int, Node, _R, Any]]:
    """Returns (step, node, rule, record) of every change that the rules made."""
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
    # Pickling preserves every attribute, but deepcopy only those listed in this entry of meta.
    preserved = graph_module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {})
    graph_module.meta[_USER_PRESERVED_ATTRIBUTES_KEY] = {**preserved, _JOURNAL: journal}
