"""Helpers that find and change nodes and weights of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def tensor(graph: fx.GraphModule, name: str) -> torch.Tensor:
    """Returns a weight or buffer by name, which may be changed in place."""
    return dict(graph.state_dict())[name]


def calls(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    """Returns the calls of an operator, such as ``softmax``, or of a module, in graph order."""

    def called(node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))

    matches = [node for node in graph.graph.nodes if node.op.startswith("call") and called(node) == name]
    assert matches, f"no call of {name}"
    return matches


def put_behind(node: fx.Node, function: Callable[..., Any], *more: Any) -> fx.Node:
    """Inserts a function between a value and all its users."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        new = node.graph.call_function(function, (node, *more))
    for user in users:
        user.replace_input_with(node, new)
    return new


def bypass(node: fx.Node, operand: Any) -> list[fx.Node]:
    """Replaces a value with another one in all its users."""
    users = list(node.users)
    for user in users:
        user.replace_input_with(node, operand)
    return users


def at_layer(graph: fx.GraphModule, pattern: str, layer: str) -> str:
    """Returns the module name for a pattern such as ``layers.{}.fc1`` in the first or last layer."""
    modules = dict(graph.named_modules())
    matches = [pattern.format(i) for i in range(99) if pattern.format(i) in modules]
    assert matches, pattern
    return matches[0 if layer == "first" else -1]
