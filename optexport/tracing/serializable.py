"""What a graph may hold that no file can."""

from __future__ import annotations

import torch
from torch import fx
from torch._functorch.predispatch import _vmap_increment_nesting

from optexport.errors import TraceError


def check_writable(graph: fx.Graph) -> None:
    """Refuses a graph that holds what ``torch.vmap`` computes, which no file format does, or a choice among sizes.

    Raises:
        TraceError: It does.
    """
    for node in graph.find_nodes(op="call_function", target=_vmap_increment_nesting):
        line = next((row.strip() for row in reversed((node.stack_trace or "").splitlines()) if "vmap(" in row), None)
        raise TraceError(
            f"it calls torch.vmap, which no file format holds{f': {line}' if line else ''}",
            location="trace",
            hint="Write it with an axis more, that of the batch, instead.",
        )
    if graph.find_nodes(op="call_function", target=torch.sym_ite):
        raise TraceError(
            "it calls torch.sym_ite on sizes, which torch.export decides as if none were 1 when files are made",
            location="trace",
            hint="Write it as arithmetic of tensors, or as an if.",
        )
