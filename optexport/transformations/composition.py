"""Compositions of transformations, DeepCopy and LintAndRecompile."""

from __future__ import annotations

import copy
import itertools
import warnings

from torch.fx import GraphModule

from optexport.transformations.base import ReversibleTransformation, Transformation
from optexport.transformations.rule import ReversibleRule, undo


class DeepCopy(ReversibleTransformation):
    """Returns a deep copy of the GraphModule, so that later steps do not change the original."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
            return copy.deepcopy(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self.transform(graph_module)


class LintAndRecompile(ReversibleTransformation):
    """Checks the graph and generates its code, between two steps of a composition."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self.transform(graph_module)


class Composition(Transformation):
    """Transformations that are applied one after the other."""

    def __init__(self, *transformations: Transformation) -> None:
        self.transformations = transformations

    @property
    def preserves_computation(self) -> bool:  # type: ignore[override]
        return all(transformation.preserves_computation for transformation in self.transformations)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for transformation in self.transformations:
            graph_module = transformation(graph_module, lint_and_recompile=False)
        return graph_module

    def _irreversible(self) -> str:
        members = (member for member in self.transformations if not isinstance(member, ReversibleTransformation))
        return next((member._irreversible() for member in members), type(self).__name__)


class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition of reversible transformations, which are undone last to first."""

    transformations: tuple[ReversibleTransformation, ...]

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        members = _flatten(self)
        # If the composition starts by copying the graph, undoing it starts by copying too.
        if (deep_copy := next((member for member in members if isinstance(member, DeepCopy)), None)) is not None:
            graph_module = deep_copy.reverse(graph_module)
        steps = [member for member in reversed(members) if not isinstance(member, DeepCopy | LintAndRecompile)]
        for are_rules, group in itertools.groupby(steps, lambda member: isinstance(member, ReversibleRule)):
            if are_rules:
                # Adjacent rules are undone together: a rule that occurs twice is undone in both places, and its first
                # application not before the steps between the two.
                undo([member for member in group if isinstance(member, ReversibleRule)], graph_module)
            else:
                for member in group:
                    graph_module = member(graph_module, lint_and_recompile=False, reverse=True)
        return graph_module


def _flatten(composition: ReversibleComposition) -> list[ReversibleTransformation]:
    members: list[ReversibleTransformation] = []
    for member in composition.transformations:
        members += _flatten(member) if isinstance(member, ReversibleComposition) else [member]
    return members


def compose(*transformations: Transformation, inplace: bool = True) -> Transformation:
    """Combines several transformations into one.

    Args:
        transformations: Applied in this order, undone in the opposite order.
        inplace: Change the GraphModule that the composition is called on. If False, change and return a deep copy.

    Returns:
        A transformation that preserves the computation if all do. A `ReversibleTransformation` if all are reversible.
    """
    steps = transformations if inplace else (DeepCopy(), *transformations)
    if all(isinstance(step, ReversibleTransformation) for step in steps):
        return ReversibleComposition(*steps)
    return Composition(*steps)
