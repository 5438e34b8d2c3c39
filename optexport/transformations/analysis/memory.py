"""Memory that results may share, and the calls that change it in place.

If nothing is known about a call, its result may share memory with any input. The answers err on the safe side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis.effects import mutated_inputs, mutated_state
from optexport.transformations.analysis.modules import called_module, measures, operator_name
from optexport.transformations.analysis.usage import uses

# Layers, Python operators, and functions, methods and ATen operators by name, whose result has its own memory.
_FRESH_MODULES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.Embedding,
)
_FRESH = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.neg, operator.pow)
_FRESH_NAMES = ("matmul", "bmm", "linear", "softmax", "layer_norm", "scaled_dot_product_attention", "cat", "stack")
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def find_change_between(graph_module: GraphModule, x: Node, first: Node, last: Node) -> Node | None:
    """Returns a node between two others that changes memory that ``x`` may share, or None."""
    between = (change for change in uses(graph_module).mutations if first < change < last)
    return next((change for change in between if _changes_memory_of(graph_module, change, x)), None)


def changed_in_place(graph_module: GraphModule, x: Node, *, detached: bool = True) -> bool:
    """Returns True if any node changes memory that the result of ``x`` may share.

    Args:
        graph_module: The graph of the node.
        x: The node.
        detached: Count ``detach_``, which changes no numbers, as a change.
    """
    changes = uses(graph_module).mutations
    counted = (change for change in changes if detached or operator_name(change) != "detach_")
    return any(_changes_memory_of(graph_module, change, x) for change in counted)


def find_constant_changes(graph_module: GraphModule, tensors: Iterable[torch.Tensor]) -> list[Node]:
    """Returns the nodes that change one of these tensors in place, under any name."""
    storages: set[object] = {_storage(tensor) for tensor in tensors}
    changes = uses(graph_module).mutations
    return [change for change in changes if not storages.isdisjoint(_changed_memory(graph_module, change))]


def _changes_memory_of(graph_module: GraphModule, change: Node, x: Node) -> bool:
    return not _changed_memory(graph_module, change).isdisjoint(_memory(graph_module, [x]))


def _changed_memory(graph_module: GraphModule, change: Node) -> set[object]:
    state = {_storage(tensor) for tensor in mutated_state(graph_module, change)}
    return state | _memory(graph_module, mutated_inputs(graph_module, change))


def reaches_output(graph_module: GraphModule, x: Node) -> bool:
    """Returns True if an output may share memory with the result of ``x``."""
    ahead, visited = [x], {x}
    while ahead:
        node = ahead.pop()
        for user in node.users:
            if user.op == "output":
                return True
            if user not in visited and node in aliased_inputs(graph_module, user):
                visited.add(user)
                ahead.append(user)
    return False


def find_constant(graph_module: GraphModule, node: object) -> torch.Tensor | None:
    """Returns the parameter or buffer that a node reads, or None if the graph changes it."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = _attribute(graph_module, node)
    return value if isinstance(value, torch.Tensor) and not find_constant_changes(graph_module, [value]) else None


def aliased_inputs(graph_module: GraphModule, node: Node) -> list[Node]:
    """Returns the inputs of a call whose memory its result may share."""
    if _is_number(node) or (not mutated_inputs(graph_module, node) and _is_fresh(graph_module, node)):
        return []
    return [source for source in node.all_input_nodes if not _is_number(source)]


def _is_fresh(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if the result of a call has its own memory."""
    if node.op == "call_module":
        return isinstance(called_module(graph_module, node), _FRESH_MODULES)
    if isinstance(node.target, torch._ops.OpOverload):
        return operator_name(node) in _FRESH_NAMES or not _may_view(node.target)
    return node.target in _FRESH or operator_name(node) in _FRESH_NAMES


def _is_number(node: Node) -> bool:
    """Returns True for sizes and other numbers, which share memory with no tensor."""
    if "val" in node.meta:
        return all(isinstance(value, _NUMBERS) for value in torch.utils._pytree.tree_leaves(node.meta["val"]))
    inputs = node.all_input_nodes if getattr(node.target, "__module__", "") == "_operator" else []
    return measures(node) or (bool(inputs) and all(map(_is_number, inputs)))


def _may_view(target: torch._ops.OpOverload) -> bool:
    """Returns True if an operator may return a view.

    Composite ones, such as reshape, may do so without a schema.
    """
    if any(returned.alias_info is not None for returned in target._schema.returns):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return composite and torch.Tag.pointwise not in target.tags


def _owners(graph_module: GraphModule, nodes: list[Node]) -> set[Node]:
    """Returns the nodes that allocated the memory that these nodes may share."""
    owners, ahead, visited = set(), list(nodes), set(nodes)
    while ahead:
        node = ahead.pop()
        if inputs := aliased_inputs(graph_module, node):
            new = [source for source in inputs if source not in visited]
            visited.update(new)
            ahead += new
        else:
            owners.add(node)
    return owners


def _memory(graph_module: GraphModule, nodes: list[Node]) -> set[object]:
    """Returns the owners of memory; for parameters and buffers, their storage."""
    owners = _owners(graph_module, nodes)
    values = {owner: _attribute(graph_module, owner) for owner in owners if owner.op == "get_attr"}
    return {_storage(value) if isinstance(value := values.get(owner), torch.Tensor) else owner for owner in owners}


def _attribute(graph_module: GraphModule, node: Node) -> Any:
    module, _, name = str(node.target).rpartition(".")
    return getattr(graph_module.get_submodule(module), name)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
