"""Keeps the way that a branch does not take from raising.

A graph computes both ways of ``if (b == 0).any(): return a``, else ``return a // b``. Whole numbers divided by zero and
indexes out of range raise. In a way that is not taken, divisors become 1 and indexes 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Operators with the position of their divisor or indexes.
_DIVISORS: Mapping[str, int] = dict.fromkeys(("div", "divide", "floor_divide", "remainder", "fmod"), 1)
_INDEXES: Mapping[str, int] = {
    **dict.fromkeys(("index", "index_put", "_unsafe_index", "_unsafe_index_put", "embedding", "take"), 1),
    **dict.fromkeys(("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"), 2),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), 2),
    "one_hot": 0,
}
_ASSERTIONS = (aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)

# A condition, and the value with which a way is taken.
_Way = tuple[fx.Node, bool]


def guard_ways(graph: fx.Graph, choices: Collection[fx.Node]) -> None:
    """Makes divisors and indexes harmless, in place, in ways that are not taken.

    Args:
        choices: Calls of ``aten.where.self`` that choose between two ways.
    """
    ways = _find_ways(graph, choices)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        # The model itself would raise before it computes a later condition.
        earlier = [way for way in ways.get(node, ()) if order[way[0]] < order[node]]
        for argument, harmless in _risky_arguments(node) if earlier else ():
            with graph.inserting_before(node):
                node.replace_input_with(argument, _choose(graph, earlier, argument, harmless))


def _find_ways(graph: fx.Graph, choices: Collection[fx.Node]) -> dict[fx.Node, set[_Way]]:
    """Returns, for each node, the ways that must be taken for its value to matter. Assertions do not count."""
    ways: dict[fx.Node, set[_Way]] = {}
    for node in reversed(graph.nodes):
        uses = [ways[user] | _entered(user, node, choices) for user in node.users if user in ways]
        if uses:
            ways[node] = set.intersection(*uses)
        elif not node.users and node.target not in _ASSERTIONS:
            ways[node] = set()
    return ways


def _entered(user: fx.Node, node: fx.Node, choices: Collection[fx.Node]) -> set[_Way]:
    """Returns the way of a choice in which it uses a node."""
    if user not in choices or user.args.count(node) > 1 or user.args[0] is node:
        return set()
    condition: Any = user.args[0]
    return {(condition, user.args[1] is node)}


def _risky_arguments(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yields whole numbers with which a call may raise, and a number with which it does not."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    name = node.target.overloadpacket.__name__.rstrip("_")
    if node.target is aten.item.default:
        # An index must be less than a size; a size should not be 0.
        yield from _whole(node.args[0], int(not any(user.target is aten.select.int for user in node.users)))
    elif name in _DIVISORS and _is_whole(node):
        yield from _whole(node.args[_DIVISORS[name]], 1)
    elif name in _INDEXES:
        yield from _whole(node.args[_INDEXES[name]], 0)


def _whole(arguments: Any, harmless: int) -> Iterator[tuple[fx.Node, int]]:
    for argument in arguments if isinstance(arguments, list | tuple) else [arguments]:
        if isinstance(argument, fx.Node) and _is_whole(argument):
            yield argument, harmless


def _is_whole(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.dtype is torch.bool)


def _choose(graph: fx.Graph, ways: Collection[_Way], argument: fx.Node, harmless: int) -> fx.Node:
    """Returns an argument if all ways are taken, and a harmless number otherwise."""
    value = argument.meta["val"]
    number = graph.call_function(aten.full_like.default, (argument, harmless))
    number.meta = {"val": value}
    for condition, is_taken in ways:
        operands = (argument, number) if is_taken else (number, argument)
        argument = graph.call_function(aten.where.self, (condition, *operands))
        argument.meta = {"val": value}
    return argument
