"""Operations that return the same for the same inputs, and results that are the same in every call."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import effects, folding, memory, modes, modules

_OPERATORS = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.neg, operator.matmul, operator.getitem, operator.and_, operator.or_, operator.not_),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
}
_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LayerNorm, nn.Embedding),
)


def is_pure(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a node returns the same for the same inputs, and changes nothing."""
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        return _is_pure_module(modules.called_module(graph_module, node))
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function" and node.target in _OPERATORS
    schema = node.target._schema
    return (
        schema.name.startswith("aten::")
        and "empty" not in schema.name
        and not schema.is_mutable
        and not effects.mutated_inputs(graph_module, node)
        and not effects.draws(graph_module, node)
    )


def _is_pure_module(module: nn.Module | None) -> bool:
    assert module is not None
    updates_statistics = module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)
    renormalizes = isinstance(module, nn.Embedding) and module.max_norm is not None
    plain = type(module) in _LAYERS and folding.find_plain_problem(module, type(module)) is None
    return plain and not updates_statistics and not renormalizes


def find_constants(graph_module: GraphModule) -> Mapping[Node, bool]:
    """Returns the nodes that depend on parameters, buffers and numbers alone, in graph order.

    Their results are tensors, or tuples of tensors, of fixed shapes. The value is False for parameters, buffers and
    views of them, and True if something is computed. Nodes in another global state, such as autocast, are left out.
    """
    constants: dict[Node, bool] = {}
    for node in graph_module.graph.nodes:
        sources = node.all_input_nodes
        if all(source in constants for source in sources) and _is_constant(graph_module, node):
            computes = node.op != "get_attr" and not is_view(node)
            constants[node] = computes or any(constants[source] for source in sources)
    return constants


def _is_constant(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a node is constant, provided that its inputs are."""
    if node.op == "get_attr":
        tensor = memory.find_constant(graph_module, node)
        if tensor is None or type(tensor) not in (torch.Tensor, nn.Parameter):
            return False
        return not tensor.is_meta and tensor.layout is torch.strided
    if node.op not in ("call_function", "call_module"):
        return False
    # torch.export writes detach_ after each tensor that the forward creates from numbers.
    if node.target is not torch.ops.aten.detach_.default and not is_pure(graph_module, node):
        return False
    return (
        all(map(_is_fixed, torch.utils._pytree.tree_leaves(node.meta.get("val"))))
        and not memory.changed_in_place(graph_module, node, detached=False)
        and not modes.find_state(graph_module, node)
    )


def _is_fixed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape)


def is_view(node: Node) -> bool:
    """Returns True if a constant node only selects or rearranges its input, without a copy."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    if all(returned.alias_info is None for returned in node.target._schema.returns):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return True
    if modules.operator_name(node) == "contiguous":
        return value.stride() == source.stride()
    copies = value.is_contiguous() and not source.is_contiguous()
    return (value.dtype, value.device) == (source.dtype, source.device) and not copies


def evaluate(graph_module: GraphModule, node: Node) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Computes a constant.

    Returns:
        The value, with its own memory and its strides; and the parameters and buffers that it depends on.
    """
    ahead, ordered = [node], {node}
    while ahead:
        sources = [source for source in ahead.pop().all_input_nodes if source not in ordered]
        ordered.update(sources)
        ahead += sources
    values: dict[Node, Any] = {}
    weights: list[torch.Tensor] = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        results = torch.utils._pytree.tree_leaves([n.meta.get("val") for n in ordered])
        for device in {value.device.type for value in results if isinstance(value, torch.Tensor)}:
            stack.enter_context(torch.autocast(device, enabled=False))
        for n in sorted(ordered):
            args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
            if n.op == "get_attr":
                values[n] = memory.find_constant(graph_module, n)
                weights.append(values[n])
            elif n.op == "call_module":
                module = graph_module.get_submodule(str(n.target))
                values[n] = module(*args, **kwargs)
                weights += module.parameters()
            else:
                assert callable(n.target)
                values[n] = n.target(*args, **kwargs)
    result: torch.Tensor = values[node]
    return result.detach().clone(), weights
