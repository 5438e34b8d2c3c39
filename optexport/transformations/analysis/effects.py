"""What a call does besides giving its result, as far as its name, its schema or its module tells: what it changes in
place, whether it draws random numbers, and whether it switches a global state.

Code that is neither PyTorch's nor Python's own may change whatever it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase

from optexport._utils import aten_ops
from optexport.transformations.analysis import modules

# Operators of Python, as functions; as methods they have underscores around them.
_MUTATING = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)


# Functions for layers that change running statistics, or rescale rows of a weight.
_LEARNING = ("batch_norm", "instance_norm", "embedding", "embedding_bag")


def mutated(graph_module: GraphModule, node: Node) -> list[Node]:
    """The arguments that a call changes in place, as far as its name or schema tells."""
    if modules.is_foreign(graph_module, node) or any(
        mutated(inner, each) for inner in modules.graphs_within(graph_module, node) for each in inner.graph.nodes
    ):
        return node.all_input_nodes
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    written = [node.kwargs.get("out")]
    if node.op == "call_module":
        module = modules.called_module(graph_module, node)
        if module is not None and any(_works_in_place(part) for part in module.modules()):
            return node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        given = aten_ops.arguments(node)
        schema = node.target._schema.arguments
        changed = [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]
        written += [*map(given.get, changed), *_learned(given)]
    elif node.op in ("call_method", "call_function"):
        name = modules.operator_name(node)
        if name in _LEARNING and (known := _given(graph_module, node)):
            written += _learned(known)
        home = getattr(node.target, "__module__", "")
        # Python has operators with an underscore for another reason: and_, or_, not_.
        in_place = name.endswith("_") and not name.endswith("__") and home != "_operator"
        # Of a function for layers, a flag by position may be the one for doing it in place.
        flagged = home == "torch.nn.functional" and any(argument is True for argument in node.args[1:])
        if in_place or name.strip("_") in _MUTATING or node.kwargs.get("inplace") is True or flagged:
            written += node.all_input_nodes if first is None else [first]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _given(graph_module: GraphModule, node: Node) -> Mapping[str, Any] | None:
    """The arguments of a call by name; None where they cannot be told."""
    try:
        known = node.normalized_arguments(graph_module, normalize_to_only_use_kwargs=True)
    except RuntimeError:  # more than one schema fits
        return None
    return None if known is None else known.kwargs


def _works_in_place(module: nn.Module) -> bool:
    """Whether a module changes what it is given."""
    idle = type(module).__module__ == nn.modules.dropout.__name__ and not module.training
    return getattr(module, "inplace", False) is True and not idle


def _learned(given: Mapping[str, Any]) -> list[Any]:
    """What a function for a layer changes of what it is given, though it does not say so."""
    learns = any(given.get(flag) for flag in ("training", "train", "use_input_stats"))
    statistics = [given.get("running_mean"), given.get("running_var")] if learns else []
    return [*statistics, given.get("weight")] if given.get("max_norm") is not None else statistics


def own_changes(graph_module: GraphModule, node: Node) -> list[torch.Tensor]:
    """What the call of a module changes of its own: running statistics, rows of a weight that are rescaled, what was
    observed or found so far."""
    module, changed = modules.called_module(graph_module, node), list[torch.Tensor]()
    if module is not None and modules.is_foreign(graph_module, node):
        return [*module.parameters(), *module.buffers()]
    for inner in modules.graphs_within(graph_module, node):
        changed += [tensor for each in inner.graph.nodes for tensor in own_changes(inner, each)]
        if any(mutated(inner, each) for each in inner.graph.nodes):
            changed += _held(inner)
    for part in () if module is None else module.modules():
        if isinstance(part, GraphModule):
            continue
        home = type(part).forward.__module__
        if isinstance(part, _NormBase) and (part.training or not part.track_running_stats):
            changed += part.buffers(recurse=False)
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            changed.append(part.weight)
        elif not home.startswith(("torch.nn.modules.", "torch.nn.utils.")) or (
            part.training and not home.startswith("torch.nn.modules.")
        ):
            changed += _held(part)  # what observes may do so always, a parametrization while it is trained
    return changed


def _held(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


# Functions that draw random numbers, besides the ATen operators that say so.
_DRAWING = (
    *("gumbel_softmax", "multi_head_attention_forward", "svd_lowrank", "pca_lowrank", "lobpcg"),
    *(f"dropout{rank}d" for rank in (1, 2, 3)),
    *(f"fractional_max_pool{rank}d{kind}" for rank in (2, 3) for kind in ("", "_with_indices")),
)


def draws(graph_module: GraphModule, node: Node) -> bool:
    """Whether a call may draw random numbers: without it, others would get those that it got."""
    graphs = modules.graphs_within(graph_module, node)
    if any(draws(inner, each) for inner in graphs for each in inner.graph.nodes):
        return True
    if node.op == "call_module":
        return any(map(_draws, graph_module.get_submodule(str(node.target)).modules()))
    if node.op not in ("call_method", "call_function"):
        return False
    name = modules.operator_name(node)
    overloads: list[Any] = [node.target]
    if not isinstance(node.target, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, name, None)
        overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    seeded = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    if not seeded and name.lstrip("_") not in _DRAWING:
        return False
    if name == "scaled_dot_product_attention":
        return bool((node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p")) not in (None, 0.0))
    given = _given(graph_module, node)
    if given is None:
        return True
    return given.get("p") != 0 and not any(given.get(flag) is False for flag in ("train", "training"))


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    dropping = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    return module.training and (dropping or isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU))


_SWITCHING = ("set_", "enter_", "exit_", "use_deterministic_", "manual_seed", "seed", "lazy_load_")


def switches(graph_module: GraphModule, node: Node) -> bool:
    """Whether a call may switch a global state, as ``torch.set_grad_enabled`` does, on which others depend.

    Foreign code may where it is given nothing, or where nobody uses its result.
    """
    if modules.is_foreign(graph_module, node):
        return not node.users or not node.all_input_nodes
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return False
    name = modules.operator_name(node)
    in_place = name.endswith("_") and not name.endswith("__")  # Tensor.set_
    nesting = name.endswith("crement_nesting")  # of torch.vmap and others that run a function in a way of their own
    return nesting or (not in_place and name.lstrip("_").startswith(_SWITCHING))
