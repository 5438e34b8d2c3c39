"""Which results may lie in the same memory, and which calls change it in place.

Where nothing is known, a result may lie in the memory of any input: what is said here errs on the safe side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis.effects import mutated, own_changes
from optexport.transformations.analysis.modules import called_module, measures, operator_name
from optexport.transformations.analysis.usage import uses

# What gives memory of its own: layers, operators of Python, and functions, methods and ATen operators by name.
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
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
_FRESH_NAMES = ("matmul", "bmm", "linear", "softmax", "layer_norm", "scaled_dot_product_attention", "cat", "stack")


def changed_between(graph_module: GraphModule, x: Node, first: Node, last: Node) -> Node | None:
    """A node between two others that changes in place memory that ``x`` may lie in, if there is one."""
    between = (change for change in uses(graph_module).mutations if first < change < last)
    return next((change for change in between if _changes_memory_of(graph_module, change, x)), None)


def changed_in_place(graph_module: GraphModule, x: Node, *, detached: bool = True) -> bool:
    """Whether memory that a node's result may lie in is changed anywhere in the graph.

    Args:
        detached: Whether it counts as a change to be cut off from gradients, with all numbers staying.
    """
    changes = uses(graph_module).mutations
    counted = (change for change in changes if detached or operator_name(change) != "detach_")
    return any(_changes_memory_of(graph_module, change, x) for change in counted)


def changes_constant(graph_module: GraphModule, tensors: Iterable[torch.Tensor]) -> list[Node]:
    """The nodes that change one of these parameters and buffers in place, under whatever name."""
    owners: set[object] = {_storage(tensor) for tensor in tensors}
    changes = uses(graph_module).mutations
    return [change for change in changes if not owners.isdisjoint(_changed(graph_module, change))]


def _changes_memory_of(graph_module: GraphModule, change: Node, x: Node) -> bool:
    return not _changed(graph_module, change).isdisjoint(_memory(graph_module, [x]))


def _changed(graph_module: GraphModule, change: Node) -> set[object]:
    """The memory that a node changes in place."""
    own = {_storage(tensor) for tensor in own_changes(graph_module, change)}
    return own | _memory(graph_module, mutated(graph_module, change))


def reaches_output(graph_module: GraphModule, x: Node) -> bool:
    """Whether an output may lie in memory that a node's result is, or is handed on by it."""
    ahead, seen = [x], {x}
    while ahead:
        node = ahead.pop()
        for user in node.users:
            if user.op == "output":
                return True
            if user not in seen and node in handed_on(graph_module, user):
                seen.add(user)
                ahead.append(user)
    return False


def constant(graph_module: GraphModule, node: object) -> torch.Tensor | None:
    """The parameter or buffer that a node reads, if nothing in the graph changes it."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = _attribute(graph_module, node)
    return value if isinstance(value, torch.Tensor) and not changes_constant(graph_module, [value]) else None


def handed_on(graph_module: GraphModule, node: Node) -> list[Node]:
    """The inputs of a call whose memory its result may lie in."""
    if _is_number(node) or (not mutated(graph_module, node) and _is_fresh(graph_module, node)):
        return []
    return [source for source in node.all_input_nodes if not _is_number(source)]


def _is_fresh(graph_module: GraphModule, node: Node) -> bool:
    """Whether a call gives memory of its own."""
    if node.op == "call_module":
        return isinstance(called_module(graph_module, node), _FRESH_MODULES)
    if isinstance(node.target, torch._ops.OpOverload):
        return operator_name(node) in _FRESH_NAMES or not _may_view(node.target)
    return node.target in _FRESH or operator_name(node) in _FRESH_NAMES


def _is_number(node: Node) -> bool:
    """Whether a node gives sizes or other numbers, which lie in the memory of no tensor."""
    if "val" in node.meta:
        return all(isinstance(value, _NUMBERS) for value in torch.utils._pytree.tree_leaves(node.meta["val"]))
    inputs = node.all_input_nodes if getattr(node.target, "__module__", "") == "_operator" else []
    return measures(node) or (bool(inputs) and all(map(_is_number, inputs)))


def _may_view(target: torch._ops.OpOverload) -> bool:
    """Whether an operator says that it gives a view; one made of others may give one and say nothing, as reshape."""
    if any(returned.alias_info is not None for returned in target._schema.returns):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return composite and torch.Tag.pointwise not in target.tags


def _owners(graph_module: GraphModule, nodes: list[Node]) -> set[Node]:
    """The nodes that made the memory which these may lie in."""
    found, ahead, seen = set(), list(nodes), set(nodes)
    while ahead:
        node = ahead.pop()
        if inputs := handed_on(graph_module, node):
            new = [source for source in inputs if source not in seen]
            seen.update(new)
            ahead += new
        else:
            found.add(node)
    return found


def _memory(graph_module: GraphModule, nodes: list[Node]) -> set[object]:
    """The same, but of parameters and buffers, which several nodes may read under several names, their memory."""
    owners = _owners(graph_module, nodes)
    values = {owner: _attribute(graph_module, owner) for owner in owners if owner.op == "get_attr"}
    return {_storage(value) if isinstance(value := values.get(owner), torch.Tensor) else owner for owner in owners}


def _attribute(graph_module: GraphModule, node: Node) -> Any:
    module, _, name = str(node.target).rpartition(".")
    return getattr(graph_module.get_submodule(module), name)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
