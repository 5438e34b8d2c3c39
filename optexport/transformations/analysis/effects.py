"""Side effects of calls: in-place changes, random numbers, and global state.

They follow from the name, the schema or the module of a call. Code that is neither PyTorch's nor Python's own may
change every argument.
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

# In-place operators of Python, as functions; the methods have underscores around these names.
_MUTATING = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)

# Functions for layers that update running statistics, or renormalize rows of a weight.
_STATEFUL = ("batch_norm", "instance_norm", "embedding", "embedding_bag")


def mutated_inputs(graph_module: GraphModule, node: Node) -> list[Node]:
    """Returns the arguments that a call changes in place."""
    if modules.is_foreign(graph_module, node) or any(
        mutated_inputs(inner, n) for inner in modules.graphs_within(graph_module, node) for n in inner.graph.nodes
    ):
        return node.all_input_nodes
    written = [node.kwargs.get("out")]
    if node.op == "call_module":
        module = modules.called_module(graph_module, node)
        if module is not None and any(map(_is_in_place, module.modules())):
            return node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        written += _written_by_operator(node)
    elif node.op in ("call_method", "call_function"):
        written += _written_by_function(graph_module, node)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _written_by_operator(node: Node) -> list[Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = aten_ops.arguments(node)
    schema = node.target._schema.arguments
    names = [argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
    return [*map(arguments.get, names), *_updated_state(arguments)]


def _written_by_function(graph_module: GraphModule, node: Node) -> list[Any]:
    name = modules.operator_name(node)
    arguments = _named_arguments(graph_module, node) if name in _STATEFUL else None
    written = _updated_state(arguments) if arguments else []
    module_name = getattr(node.target, "__module__", "")
    # The operators and_, or_ and not_ of Python end in an underscore, but are not in place.
    in_place = name.endswith("_") and not name.endswith("__") and module_name != "_operator"
    # A positional True of a function for layers may be its flag `inplace`.
    flagged = module_name == "torch.nn.functional" and any(argument is True for argument in node.args[1:])
    if in_place or name.strip("_") in _MUTATING or node.kwargs.get("inplace") is True or flagged:
        first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
        written += node.all_input_nodes if first is None else [first]
    return written


def _named_arguments(graph_module: GraphModule, node: Node) -> Mapping[str, Any] | None:
    """Returns the arguments of a call by name, or None if they are ambiguous."""
    try:
        arguments = node.normalized_arguments(graph_module, normalize_to_only_use_kwargs=True)
    except RuntimeError:  # more than one schema fits
        return None
    return None if arguments is None else arguments.kwargs


def _is_in_place(module: nn.Module) -> bool:
    idle = type(module).__module__ == nn.modules.dropout.__name__ and not module.training
    return getattr(module, "inplace", False) is True and not idle


def _updated_state(arguments: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that a function such as ``batch_norm`` or ``embedding`` writes to.

    The schema does not declare these writes.
    """
    training = any(arguments.get(flag) for flag in ("training", "train", "use_input_stats"))
    statistics = [arguments.get("running_mean"), arguments.get("running_var")] if training else []
    return [*statistics, arguments.get("weight")] if arguments.get("max_norm") is not None else statistics


def mutated_state(graph_module: GraphModule, node: Node) -> list[torch.Tensor]:
    """Returns the parameters and buffers of a called module that the call changes.

    For example running statistics, rows of a weight that are renormalized, or the values of an observer.
    """
    module, changed = modules.called_module(graph_module, node), list[torch.Tensor]()
    if module is not None and modules.is_foreign(graph_module, node):
        return [*module.parameters(), *module.buffers()]
    for inner in modules.graphs_within(graph_module, node):
        changed += [tensor for n in inner.graph.nodes for tensor in mutated_state(inner, n)]
        if any(mutated_inputs(inner, n) for n in inner.graph.nodes):
            changed += _own_tensors(inner)
    for part in () if module is None else module.modules():
        changed += _updated_by(part)
    return changed


def _updated_by(module: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors of a module, without its children, that its forward changes."""
    if isinstance(module, GraphModule):
        return []
    if isinstance(module, _NormBase) and (module.training or not module.track_running_stats):
        return list(module.buffers(recurse=False))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return [module.weight]
    package = type(module).forward.__module__
    is_layer = package.startswith("torch.nn.modules.")
    # An observer may change its tensors at any time, a parametrization in train mode.
    if not is_layer and (module.training or not package.startswith("torch.nn.utils.")):
        return _own_tensors(module)
    return []


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


# Functions that draw random numbers, in addition to the ATen operators with the tag nondeterministic_seeded.
_RANDOM = (
    *("gumbel_softmax", "multi_head_attention_forward", "svd_lowrank", "pca_lowrank", "lobpcg"),
    *(f"dropout{rank}d" for rank in (1, 2, 3)),
    *(f"fractional_max_pool{rank}d{kind}" for rank in (2, 3) for kind in ("", "_with_indices")),
)


def draws(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a call may draw random numbers.

    Removing it would change the numbers of later calls.
    """
    graphs = modules.graphs_within(graph_module, node)
    if any(draws(inner, n) for inner in graphs for n in inner.graph.nodes):
        return True
    if node.op == "call_module":
        return any(map(_module_draws, graph_module.get_submodule(str(node.target)).modules()))
    return node.op in ("call_method", "call_function") and _function_draws(graph_module, node)


def _function_draws(graph_module: GraphModule, node: Node) -> bool:
    name = modules.operator_name(node)
    overloads: list[Any] = [node.target]
    if not isinstance(node.target, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, name, None)
        overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    seeded = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    if not seeded and name.lstrip("_") not in _RANDOM:
        return False
    if name == "scaled_dot_product_attention":
        return bool((node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p")) not in (None, 0.0))
    arguments = _named_arguments(graph_module, node)
    if arguments is None:
        return True
    return arguments.get("p") != 0 and not any(arguments.get(flag) is False for flag in ("train", "training"))


def _module_draws(module: nn.Module) -> bool:
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    has_dropout = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    return module.training and (has_dropout or isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU))


_SWITCHES = ("set_", "enter_", "exit_", "use_deterministic_", "manual_seed", "seed", "lazy_load_")


def switches(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a call may change global state, as ``torch.set_grad_enabled`` does.

    Foreign code may do so if it has no tensor arguments, or if its result is unused.
    """
    if modules.is_foreign(graph_module, node):
        return not node.users or not node.all_input_nodes
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return False
    name = modules.operator_name(node)
    in_place = name.endswith("_") and not name.endswith("__")  # Tensor.set_
    nesting = name.endswith("crement_nesting")  # of torch.vmap and other function transforms
    return nesting or (not in_place and name.lstrip("_").startswith(_SWITCHES))
