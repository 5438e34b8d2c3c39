"""Several transformations as one, and the two helpers that compositions are made with."""

from __future__ import annotations

import copy
import itertools
import warnings

from torch.fx import GraphModule

from optexport.transformations.base import ReversibleTransformation, Transformation
from optexport.transformations.rule import ReversibleRule, undo


class DeepCopy(ReversibleTransformation):
    """Goes on with a deep copy of the GraphModule, so that the given one stays as it is."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
            return copy.deepcopy(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self.transform(graph_module)


class LintAndRecompile(ReversibleTransformation):
    """Checks the graph and generates its code, in the middle of a composition."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self.transform(graph_module)


class Composition(Transformation):
    """Transformations applied one after the other.

    Args:
        transformations: In the order in which they are applied.
    """

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
        members = (each for each in self.transformations if not isinstance(each, ReversibleTransformation))
        return next((member._irreversible() for member in members), type(self).__name__)


class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition of reversible transformations, undone last to first."""

    transformations: tuple[ReversibleTransformation, ...]

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        # A copy that the composition starts from must be the first step of the way back too.
        members = _flat(self)
        for copies in [member for member in members if isinstance(member, DeepCopy)][:1]:
            graph_module = copies.reverse(graph_module)
        others = [member for member in reversed(members) if not isinstance(member, DeepCopy | LintAndRecompile)]
        for are_rules, some in itertools.groupby(others, lambda member: isinstance(member, ReversibleRule)):
            if are_rules:
                # At once, since a rule that stands in two places is undone in both, and not before what came between.
                undo([member for member in some if isinstance(member, ReversibleRule)], graph_module)
            else:
                for member in some:
                    graph_module = member(graph_module, lint_and_recompile=False, reverse=True)
        return graph_module


def _flat(composition: ReversibleComposition) -> list[ReversibleTransformation]:
    members: list[ReversibleTransformation] = []
    for member in composition.transformations:
        members += _flat(member) if isinstance(member, ReversibleComposition) else [member]
    return members


def compose(*transformations: Transformation, inplace: bool = True) -> Transformation:
    """Makes one transformation of several.

    Args:
        transformations: In the order in which they are applied; undone in the opposite order.
        inplace: Whether to change the given GraphModule; else a deep copy is changed and returned.

    Returns:
        A transformation that preserves the computation if all do, and a `ReversibleTransformation` if all are.
    """
    steps = transformations if inplace else (DeepCopy(), *transformations)
    if all(isinstance(step, ReversibleTransformation) for step in steps):
        return ReversibleComposition(*steps)
    return Composition(*steps)
