"""Random numbers that outputs hang on: what draws seldom, or from a peaked distribution, shows in no two runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch
from torch import fx

from optexport import overloads
from optexport.errors import TraceError

# Arguments of operators that draw only where these are true, or not zero.
_SWITCHES = ("train", "training")
_SHARES = ("p", "dropout", "dropout_p")


def check_none(graph: fx.Graph, names: Collection[str], kept: Collection[str]) -> None:
    """Refuses a graph of which an output depends on random numbers.

    Args:
        names: The outputs of the graph, in their order.
        kept: Those that are wanted.

    Raises:
        TraceError: One does.
    """
    returned = graph.output_node().all_input_nodes
    named = dict(zip(names, returned, strict=True)) if len(names) == len(returned) else {}
    wanted = [node for name, node in named.items() if name in kept] or returned
    for node in _needed(wanted):
        if _draws(node):
            line = re.findall(r'File ".*?([^/\\"]+)", line (\d+).*\n\s*(.+)', node.stack_trace or "")
            where = f", at {line[-1][0]}:{line[-1][1]}: {line[-1][2]}" if line else ""
            raise TraceError(
                f"the model gives other results when it is run again on the same input: {node.target} draws random "
                f"numbers that its outputs depend on{where}",
                place="trace",
                mend="Have it draw none in eval mode, or take them as an input; or leave out what depends on them "
                "(keep-outputs).",
            )


def _needed(wanted: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What outputs are made of, with what writes into that."""
    seen, found = set(wanted), list(wanted)
    for node in found:
        yield node
        writing = [user for user in node.users if _writes_to(user, node)]
        new = [other for other in (*node.all_input_nodes, *writing) if other not in seen]
        seen.update(new)
        found += new


def _writes_to(user: fx.Node, node: fx.Node) -> bool:
    is_mutable = isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
    return bool(is_mutable and user.args and user.args[0] is node)


def _draws(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    arguments = overloads.arguments(node)
    is_off = any(arguments.get(name, True) is False for name in _SWITCHES)
    return not is_off and not any(arguments.get(name, 1) == 0 for name in _SHARES)
