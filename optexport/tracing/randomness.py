"""Random numbers that outputs hang on: what draws seldom, or from a peaked distribution, shows in no two runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import fx

from optexport.errors import TraceError
from optexport.transformations.analysis import effects


def check_none(graph_module: fx.GraphModule, names: Collection[str], kept: Collection[str]) -> None:
    """Refuses a graph of which an output depends on random numbers.

    Args:
        names: The outputs of the graph, in their order.
        kept: Those that are wanted.

    Raises:
        TraceError: One does.
    """
    returned = graph_module.graph.output_node().all_input_nodes
    named = dict(zip(names, returned, strict=True)) if len(names) == len(returned) else {}
    wanted = [node for name, node in named.items() if name in kept] or returned
    for node in _needed(graph_module, wanted):
        if effects.draws(graph_module, node):
            line = re.findall(r'File ".*?([^/\\"<]+)", line (\d+).*\n\s*(.+)', node.stack_trace or "")
            where = f", at {line[-1][0]}:{line[-1][1]}: {line[-1][2]}" if line else ""
            raise TraceError(
                f"its outputs depend on random numbers, which {node.target} draws{where}",
                location="trace",
                hint="Have it draw none in eval mode, or take them as an input; or leave out what depends on them "
                "(keep-outputs).",
            )


def _needed(graph_module: fx.GraphModule, wanted: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What outputs are made of, with what writes into that, or into a view of it as far as anybody knows."""
    writing = {node: effects.mutated(graph_module, node) for node in graph_module.graph.nodes}
    drawn = [node for node, changed in writing.items() if changed and effects.draws(graph_module, node)]
    seen, found = {*wanted, *drawn}, [*wanted, *drawn]
    for node in found:
        yield node
        writers = [user for user in node.users if node in writing[user]]
        new = [other for other in (*node.all_input_nodes, *writers) if other not in seen]
        seen.update(new)
        found += new
