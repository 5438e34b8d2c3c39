"""Restores a graph if a change of it fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule


@contextmanager
def restored_on_failure(graph_module: GraphModule) -> Iterator[None]:
    """Restores the graph and its modules if the body raises anything.

    The nodes of a restored graph are new. Numbers written into a tensor are not restored.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
        graph = copy.deepcopy(graph_module.graph)
    # Copies the dicts of parameters, buffers, submodules and hooks too.
    before = {
        module: {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for module in graph_module.modules()
    }
    try:
        yield
    except BaseException:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
        graph_module.graph = graph
        raise
