"""Refuses graphs with random outputs, and graphs that no file format can store."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx
from torch._functorch.predispatch import _vmap_increment_nesting

from optexport._utils.user_lines import find_node_line
from optexport.errors import TraceError
from optexport.transformations.analysis import effects


def check_deterministic(graph_module: fx.GraphModule, names: Collection[str], checked: Collection[str]) -> None:
    """Checks that no output of a graph depends on random numbers.

    Running a model twice does not show this reliably: rare or nearly constant random numbers give the same result.

    Args:
        names: The names of all outputs, in the order of the graph.
        checked: The names of the outputs to check.

    Raises:
        TraceError: An output does.
    """
    returned = graph_module.graph.output_node().all_input_nodes
    outputs = dict(zip(names, returned, strict=True)) if len(names) == len(returned) else {}
    nodes = [node for name, node in outputs.items() if name in checked] or returned
    for node in _dependencies(graph_module, nodes):
        if effects.draws(graph_module, node):
            line = find_node_line(node.stack_trace)
            location = f", at {line}" if line else ""
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


def check_writable(graph: fx.Graph) -> None:
    """Checks that a graph contains neither ``torch.vmap`` nor a choice between sizes.

    Raises:
        TraceError: It does.
    """
    for node in graph.find_nodes(op="call_function", target=_vmap_increment_nesting):
        line = next((row.strip() for row in reversed((node.stack_trace or "").splitlines()) if "vmap(" in row), None)
        raise TraceError(
            f"the model calls torch.vmap, which no file format supports{f': {line}' if line else ''}",
            location="trace",
            hint="Write the computation with a batch axis instead.",
        )
    if graph.find_nodes(op="call_function", target=torch.sym_ite):
        raise TraceError(
            "the model calls torch.sym_ite on sizes, which torch.export evaluates as if no size could be 1",
            location="trace",
            hint="Write it as tensor arithmetic, or as an if statement.",
        )
