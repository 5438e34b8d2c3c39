"""The contract of a transformation, as Optimum's users know it, and the marks that transformations leave on nodes."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node

# ``node.meta["custom"]`` is the one place on a node that survives deepcopy, ``fx.Transformer`` and export. Copies of
# a node share the value, so it is always replaced and never changed; and it names nodes instead of holding them.
_META = "custom"
_MARKS = "optexport"


def marks(node: Node) -> dict[str, Any]:
    """What transformations left on a node: their records by the transformation's signature."""
    return dict((node.meta.get(_META) or {}).get(_MARKS, {}))


def set_marks(node: Node, values: Mapping[str, Any]) -> None:
    """Replaces all marks of a node."""
    node.meta[_META] = {**(node.meta.get(_META) or {}), _MARKS: dict(values)}
    if not values:
        del node.meta[_META][_MARKS]
        if not node.meta[_META]:
            del node.meta[_META]


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

    def __call__(self, graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
        """Transforms a graph.

        Args:
            graph_module: The graph to transform.
            lint_and_recompile: Whether to check the graph and generate its code afterwards. False saves time where
                another transformation follows that does.
        """
        return _finish(self.transform(graph_module), lint_and_recompile)

    @property
    def signature(self) -> str:
        """Identifies the transformation: equal for equal classes with equal attributes, in every process."""
        return hashlib.sha256(_canonical((type(self), vars(self))).encode()).hexdigest()[:16]

    def mark_as_transformed(self, node: Node) -> None:
        """Marks a node as transformed by this transformation."""
        set_marks(node, {**marks(node), self.signature: None})

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
        return _finish((self.reverse if reverse else self.transform)(graph_module), lint_and_recompile)

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


def _finish(graph_module: GraphModule, lint_and_recompile: bool) -> GraphModule:
    if lint_and_recompile:
        graph_module.graph.lint()
        graph_module.recompile()
    return graph_module


def _canonical(value: Any) -> str:
    """A text that is equal for equal values only, whatever the process, its hash seed or its addresses.

    ``hash`` would not do: it is salted per process, and -1 and -2, or 1 and True, collide.
    """
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    match value:
        case Transformation():
            inner = value.signature
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            inner = f"{value.__module__}.{value.__qualname__}"
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            inner = repr(value)
        case enum.Enum():
            inner = value.name
        case torch.Tensor():
            content = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
            inner = f"{value.dtype}{list(value.shape)}{hashlib.sha256(content.numpy().tobytes()).hexdigest()}"
        case Mapping():
            inner = ",".join(sorted(f"{_canonical(k)}={_canonical(v)}" for k, v in value.items()))
        case Set():
            inner = ",".join(sorted(map(_canonical, value)))
        case Sequence():
            inner = ",".join(map(_canonical, value))
        case _ if dataclasses.is_dataclass(value):
            inner = _canonical({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        case _:
            inner = _canonical(vars(value)) if hasattr(value, "__dict__") else repr(value)
    return f"{name}({inner})"
