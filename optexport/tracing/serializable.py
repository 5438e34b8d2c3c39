"""Refuses graphs with operators that no file format can store."""

from __future__ import annotations

import torch
from torch import fx
from torch._functorch.predispatch import _vmap_increment_nesting

from optexport.errors import TraceError


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
