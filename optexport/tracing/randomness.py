"""Refuses models whose outputs depend on random numbers.

Running a model twice does not show this reliably: rare or nearly constant random numbers give the same result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import fx

from optexport.errors import TraceError
from optexport.transformations.analysis import effects


def check_none(graph_module: fx.GraphModule, names: Collection[str], kept: Collection[str]) -> None:
    """Checks that no output of a graph depends on random numbers.

    Args:
        names: The names of all outputs, in the order of the graph.
        kept: The names of the outputs to check.

    Raises:
        TraceError: An output does.
    """
    returned = graph_module.graph.output_node().all_input_nodes
    outputs = dict(zip(names, returned, strict=True)) if len(names) == len(returned) else {}
    checked = [node for name, node in outputs.items() if name in kept] or returned
    for node in _dependencies(graph_module, checked):
        if effects.draws(graph_module, node):
            line = re.findall(r'File ".*?([^/\\"<]+)", line (\d+).*\n\s*(.+)', node.stack_trace or "")
            location = f", at {line[-1][0]}:{line[-1][1]}: {line[-1][2]}" if line else ""
            raise TraceError(
                f"the outputs depend on random numbers, which {node.target} draws{location}",
                location="trace",
                hint="Turn the randomness off in eval mode, take the numbers as an input, or remove the outputs that"
                " depend on them (rule keep-outputs).",
            )


def _dependencies(graph_module: fx.GraphModule, outputs: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yields the nodes that outputs depend on, including writes to them or their views.

    A write of random numbers counts as a dependency even if its target is unknown.
    """
    mutated = {node: effects.mutated_inputs(graph_module, node) for node in graph_module.graph.nodes}
    random_writes = [node for node, targets in mutated.items() if targets and effects.draws(graph_module, node)]
    visited, queue = {*outputs, *random_writes}, [*outputs, *random_writes]
    for node in queue:
        yield node
        writers = [user for user in node.users if node in mutated[user]]
        new = [source for source in (*node.all_input_nodes, *writers) if source not in visited]
        visited.update(new)
        queue += new
