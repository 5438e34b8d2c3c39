"""How the mistakes of this catalogue find what they spoil in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def tensor(graph: fx.GraphModule, name: str) -> torch.Tensor:
    """A weight or buffer by name, to be changed in place."""
    return dict(graph.state_dict())[name]


def calls(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    """The calls of an operator, as ``softmax``, or of a module, in the order of the graph."""

    def called(node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))

    found = [node for node in graph.graph.nodes if node.op.startswith("call") and called(node) == name]
    assert found, f"no call of {name}"
    return found


def put_behind(node: fx.Node, function: Callable[..., Any], *more: Any) -> fx.Node:
    """Puts a function of a value between it and all that use it."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        new = node.graph.call_function(function, (node, *more))
    for user in users:
        user.replace_input_with(node, new)
    return new


def bypass(node: fx.Node, operand: Any) -> list[fx.Node]:
    """Has all that use a value use another instead."""
    users = list(node.users)
    for user in users:
        user.replace_input_with(node, operand)
    return users


def at_layer(graph: fx.GraphModule, pattern: str, layer: str) -> str:
    """The name that a pattern, as ``layers.{}.fc1``, has in the first or the last layer."""
    modules = dict(graph.named_modules())
    found = [pattern.format(i) for i in range(99) if pattern.format(i) in modules]
    assert found, pattern
    return found[0 if layer == "first" else -1]
