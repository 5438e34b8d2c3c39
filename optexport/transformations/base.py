"""The contract of a transformation, as Optimum's users know it, and the marks that transformations leave on nodes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from optexport.errors import TransformationError, first_line
from optexport.transformations.analysis.canonical import canonical
from optexport.transformations.analysis.snapshot import restored_on_failure

# ``node.meta["custom"]`` is the one place on a node that survives deepcopy, ``fx.Transformer`` and export. Copies of
# a node share the value, so it is always replaced and never changed; and it names nodes instead of holding them.
_META = "custom"
_MARKS = "optexport"


def marks(node: Node) -> dict[str, tuple[tuple[int, Any], ...]]:
    """What transformations left on a node, by their signatures: when each change was made, and its record.

    There is none where a transformation keeps no records, or somebody set the mark by hand.
    """
    return dict((node.meta.get(_META) or {}).get(_MARKS, {}))


def set_marks(node: Node, values: Mapping[str, tuple[tuple[int, Any], ...]]) -> None:
    """Replaces all marks of a node."""
    node.meta[_META] = {**(node.meta.get(_META) or {}), _MARKS: dict(values)}
    if not values:
        del node.meta[_META][_MARKS]
        if not node.meta[_META]:
            del node.meta[_META]


class IrreversibleError(TransformationError, TypeError):
    """``reverse=True`` for what cannot be undone. In Optimum this is a TypeError, and so it is one here too."""


class Transformation(ABC):
    """A transformation of a ``torch.fx`` graph.

    Subclasses implement `transform` and are used by calling them on a GraphModule, which they change in place.
    To write one, start from `Rule`, which leaves only the idea itself to write.

    Attributes:
        preserves_computation: Whether the transformed graph gives the same outputs as the graph before.
    """

    preserves_computation: bool = False

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Changes the graph; returns the GraphModule to go on with."""

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Transforms a graph; one that fails leaves it as it was.

        Args:
            graph_module: The graph to transform.
            lint_and_recompile: Whether to check the graph and generate its code afterwards. False saves time where
                another transformation follows that does.
            reverse: For those that can be undone; see `ReversibleTransformation`.

        Raises:
            IrreversibleError: It is asked to be undone, and cannot be.
        """
        if reverse:
            raise IrreversibleError(
                "it cannot be undone",
                location=self._irreversible(),
                hint="Leave reverse=True away, or keep a deepcopy.",
            )
        return _call(self.transform, graph_module, lint_and_recompile)

    @property
    def signature(self) -> str:
        """Identifies the transformation: equal for equal classes with equal attributes, in every process.

        Raises:
            TransformationError: An attribute cannot be compared across processes, as a lock or a file cannot.
        """
        try:
            text = canonical((type(self), vars(self)))
        except (TypeError, RecursionError) as error:
            raise TransformationError(
                f"its attributes cannot tell it from others of its kind: {first_line(error)}",
                location=type(self).__name__,
                hint="Keep plain data in them, or define the property signature.",
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _irreversible(self) -> str:
        """The name of what cannot be undone."""
        return type(self).__name__

    def mark_as_transformed(self, node: Node) -> None:
        """Marks a node as transformed by this transformation."""
        set_marks(node, {self.signature: (), **marks(node)})

    def transformed(self, node: Node) -> bool:
        """Whether this transformation marked the node."""
        return self.signature in marks(node)

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes that this transformation marked, in the graph's order."""
        signature = self.signature
        return [node for node in graph_module.graph.nodes if signature in marks(node)]


class ReversibleTransformation(Transformation):
    """A transformation that can be undone, by calling it with ``reverse=True``."""

    @abstractmethod
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undoes `transform`; returns the GraphModule to go on with."""

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Transforms a graph, or undoes that.

        Args:
            graph_module: The graph to transform.
            lint_and_recompile: Whether to check the graph and generate its code afterwards.
            reverse: Whether to undo the transformation instead.
        """
        return _call(self.reverse if reverse else self.transform, graph_module, lint_and_recompile)

    def mark_as_restored(self, node: Node) -> None:
        """Takes this transformation's mark off a node.

        Raises:
            ValueError: The node does not bear it.
        """
        remaining = marks(node)
        if self.signature not in remaining:
            raise ValueError(f"The node {node.name} was not transformed by this transformation.")
        del remaining[self.signature]
        set_marks(node, remaining)


def _call(
    transform: Callable[[GraphModule], GraphModule], graph_module: GraphModule, lint_and_recompile: bool
) -> GraphModule:
    with restored_on_failure(graph_module):
        graph_module = transform(graph_module)
        if lint_and_recompile:
            graph_module.graph.lint()
            graph_module.recompile()
    return graph_module
