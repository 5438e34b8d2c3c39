"""What a node changes in place, as far as its name, its schema or its module tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase

from optexport.transformations import modules

# Operators of Python, as functions; as methods they have underscores around them.
_MUTATING = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)


# Functions for layers that change running statistics, or rescale rows of a weight.
_LEARNING = ("batch_norm", "instance_norm", "embedding", "embedding_bag")


def mutated(graph_module: GraphModule, node: Node) -> list[Node]:
    """The arguments that a call changes in place, as far as its name or schema tells."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    written = [node.kwargs.get("out")]
    if node.op == "call_module":
        module = modules.called_module(graph_module, node)
        if module is not None and any(_works_in_place(part) for part in module.modules()):
            return node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        given = {**node.kwargs, **dict(zip((argument.name for argument in arguments), node.args, strict=False))}
        changed = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        written += [*map(given.get, changed), *_learned(given)]
    elif node.op in ("call_method", "call_function"):
        name = modules.operator_name(node)
        if name in _LEARNING and (known := node.normalized_arguments(graph_module, normalize_to_only_use_kwargs=True)):
            written += _learned(known.kwargs)
        home = getattr(node.target, "__module__", "")
        # Python has operators with an underscore for another reason: and_, or_, not_.
        in_place = name.endswith("_") and not name.endswith("__") and home != "_operator"
        # Of a function for layers, a flag by position may be the one for doing it in place.
        flagged = home == "torch.nn.functional" and any(argument is True for argument in node.args[1:])
        if in_place or name.strip("_") in _MUTATING or node.kwargs.get("inplace") is True or flagged:
            written += node.all_input_nodes if first is None else [first]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _works_in_place(module: nn.Module) -> bool:
    """Whether a module, or the graph that it is, changes what it is given."""
    if isinstance(module, GraphModule):
        return any(mutated(module, node) for node in module.graph.nodes)
    idle = type(module).__module__ == nn.modules.dropout.__name__ and not module.training
    return getattr(module, "inplace", False) is True and not idle


def _learned(given: Mapping[str, Any]) -> list[Any]:
    """What a function for a layer changes of what it is given, though it does not say so."""
    learns = any(given.get(flag) for flag in ("training", "train", "use_input_stats"))
    statistics = [given.get("running_mean"), given.get("running_var")] if learns else []
    return [*statistics, given.get("weight")] if given.get("max_norm") is not None else statistics


def own_changes(graph_module: GraphModule, node: Node) -> list[torch.Tensor]:
    """What the call of a module changes of its own: running statistics, or rows of a weight that are rescaled."""
    module, changed = modules.called_module(graph_module, node), list[torch.Tensor]()
    for part in () if module is None else module.modules():
        if isinstance(part, _NormBase) and (part.training or not part.track_running_stats):
            changed += part.buffers(recurse=False)
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            changed.append(part.weight)
    return changed
