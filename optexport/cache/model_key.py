"""A digest of what a model computes: of its traced graph, and of the code that it is of."""

from __future__ import annotations

import hashlib
import json

from torch import fx, nn

from optexport.cache import keys, store
from optexport.cache.imported_modules import KNOWN, code_beside_packages, code_of


def of(graph_module: fx.GraphModule, model: nn.Module) -> str | None:
    """SHA-256 of a graph with its weights, and of its model's code; None where nothing is kept, or names do not do.

    The graph holds every number that the model computes with, wherever that is from. The code may tell more: what it
    does in another dtype than the traced one. A helper may lie anywhere: all that was imported has a say but for
    installed packages.

    Args:
        model: What was traced.
    """
    if not store.enabled() or (graph := keys.of_graph(graph_module)) is None:
        return None
    # All that was imported from where a package lies is its code, whichever of its modules is asked for.
    modules = {name.partition(".")[0]: name for name in sorted({type(part).__module__ for part in model.modules()})}
    code = {package: code_of(name) for package, name in modules.items() if package not in KNOWN}
    digests = [graph, code, code_beside_packages()]
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
