"""Digest of a model's computation, from its traced graph and its code."""

from __future__ import annotations

import hashlib
import json

from torch import fx, nn

from optexport.cache import keys, store
from optexport.cache.imported_modules import IDENTIFIED_PACKAGES, code_of, code_outside_packages


def make_model_key(graph_module: fx.GraphModule, model: nn.Module) -> str | None:
    """Returns the SHA-256 of a graph, its weights and the model's code, or None.

    The result is None if the cache is off or the graph calls an unknown function.

    The graph contains every number of the computation. The code can add more, such as its behavior in a dtype that was
    not traced. It may import helpers from anywhere, so all imported code counts, except installed packages.

    Args:
        model: The traced model.
    """
    if not store.enabled() or (graph := keys.of_graph(graph_module)) is None:
        return None
    digests = [graph, *code_of_model(model)]
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def code_of_model(model: nn.Module) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Returns the digests of the code in the packages of a model's classes, and of all code outside packages."""
    # The digest covers all imported modules of a package, so one module per package is enough.
    modules = {name.partition(".")[0]: name for name in sorted({type(part).__module__ for part in model.modules()})}
    code = {package: code_of(name) for package, name in modules.items() if package not in IDENTIFIED_PACKAGES}
    return code, code_outside_packages()
