"""Putting a graph back as it was when something that changed it fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule


@contextmanager
def restored_on_failure(graph_module: GraphModule) -> Iterator[None]:
    """Within it, the graph and the modules may be changed; whatever is raised puts them back.

    The nodes of a graph that was put back are new ones. Numbers that were written into a tensor stay there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
        graph = copy.deepcopy(graph_module.graph)
    # The dicts are those of parameters, buffers, submodules and hooks, by name.
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
