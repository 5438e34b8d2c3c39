"""Base classes of transformations, as in Optimum's FX library, and their marks on nodes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from optexport.errors import TransformationError, first_line
from optexport.transformations.analysis.canonical import canonical
from optexport.transformations.analysis.snapshot import restored_on_failure

# ``node.meta["custom"]`` is the only field of a node that survives deepcopy, ``fx.Transformer`` and export. Copies of a
# node share its value, so the value is replaced and never changed, and it contains node names instead of nodes.
_META = "custom"
_MARKS = "optexport"


def marks(node: Node) -> dict[str, tuple[tuple[int, Any], ...]]:
    """Returns (step, record) of each change of a node, by the transformation's signature.

    The tuple is empty for transformations that keep no records, and for marks set by hand.
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
    """Error for ``reverse=True`` on an irreversible transformation.

    A TypeError, because Optimum raises one.
    """


class Transformation(ABC):
    """A transformation of a ``torch.fx`` graph.

    Subclasses implement `transform`. Users call an instance on a GraphModule, which is changed in place.
    To write one, start from `Rule`, which needs less code.

    Attributes:
        preserves_computation: True if the transformed graph returns the same outputs as the original.
    """

    preserves_computation: bool = False

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Changes the graph and returns the resulting GraphModule."""

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Transforms a graph. If the transformation fails, the graph is restored.

        Args:
            graph_module: The graph to transform.
            lint_and_recompile: Check the graph and generate its code afterwards. False saves time if another
                transformation follows that does this.
            reverse: Undo the transformation instead; see `ReversibleTransformation`.

        Raises:
            IrreversibleError: `reverse` is set, but the transformation cannot be undone.
        """
        if reverse:
            raise IrreversibleError(
                "this transformation cannot be undone",
                location=self._irreversible(),
                hint="Do not pass reverse=True, or keep a deepcopy of the original graph.",
            )
        return _call(self.transform, graph_module, lint_and_recompile)

    @property
    def signature(self) -> str:
        """Identifier that is equal for equal classes with equal attributes, in every process.

        Raises:
            TransformationError: An attribute cannot be compared across processes (for example a lock or a file).
        """
        try:
            text = canonical((type(self), vars(self)))
        except (TypeError, RecursionError) as error:
            raise TransformationError(
                f"the attributes cannot be compared across processes: {first_line(error)}",
                location=type(self).__name__,
                hint="Store only plain data in attributes, or define the property signature.",
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _irreversible(self) -> str:
        """Returns the name of the class that cannot be undone."""
        return type(self).__name__

    def mark_as_transformed(self, node: Node) -> None:
        """Marks a node as transformed by this transformation."""
        set_marks(node, {self.signature: (), **marks(node)})

    def transformed(self, node: Node) -> bool:
        """Returns True if this transformation marked the node."""
        return self.signature in marks(node)

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """Returns the nodes that this transformation marked, in graph order."""
        signature = self.signature
        return [node for node in graph_module.graph.nodes if signature in marks(node)]


class ReversibleTransformation(Transformation):
    """A transformation that can be undone, by calling it with ``reverse=True``."""

    @abstractmethod
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undoes `transform` and returns the resulting GraphModule."""

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Transforms a graph, or undoes the transformation. If that fails, the graph is restored.

        Args:
            graph_module: The graph to transform.
            lint_and_recompile: Check the graph and generate its code afterwards.
            reverse: Undo the transformation instead.
        """
        return _call(self.reverse if reverse else self.transform, graph_module, lint_and_recompile)

    def mark_as_restored(self, node: Node) -> None:
        """Removes this transformation's mark from a node.

        Raises:
            ValueError: The node has no such mark.
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
        graph_module = _check_is_graph(transform, transform(graph_module))
        if lint_and_recompile:
            graph_module.graph.lint()
            graph_module.recompile()
    return graph_module


def _check_is_graph(transform: Callable[..., Any], result: Any) -> GraphModule:
    """Checks that a transformation returned a graph; a forgotten ``return`` gives None."""
    if not isinstance(result, GraphModule):
        method = transform.__name__
        raise TransformationError(
            f"{method} returned {type(result).__name__}, expected a GraphModule",
            location=type(getattr(transform, "__self__", transform)).__name__,
            hint=f"End {method} with: return graph_module",
        )
    return result
