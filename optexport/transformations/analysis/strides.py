"""Memory layout of results, and the users that require a contiguous one."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import memory, modules


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has the strides of a new one, also along axes of size 1."""
    strided = tensor.layout is torch.strided
    return strided and tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


# Operations that fail or give other results for a slice, or for other strides than a whole result has.
_STRICT = (
    *("view", "view_as", "as_strided", "as_strided_", "view_as_complex", "resize_", "resize_as_", "set_", "unfold"),
    *("detach_", "stride", "sym_stride", "storage_offset", "sym_storage_offset", "is_contiguous"),
)
# Operations that may return a copy instead of a view. The result of the second group is always contiguous.
_NEW_MEMORY = ("contiguous", "clone")
_COPIES = ("reshape", "reshape_as", "flatten", "ravel", *_NEW_MEMORY)
# Operations whose result is contiguous for any layout of the input. Others may keep the order of axes in memory.
_CONTIGUOUS = ("linear", "layer_norm", "matmul", "bmm", "mm", "addmm", "conv1d", "conv2d", "conv3d", "embedding")
_CONTIGUOUS_MODULES = (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def needs_contiguous(graph_module: GraphModule, call: Node, width: int | None) -> Node | None:
    """Returns a user of a result, or of a view of it, that requires it to be contiguous.

    None if there is none.

    Code that is neither PyTorch's nor Python's own is such a user, because it may view its input in any shape.
    A slice of the last axis can be viewed in any shape that keeps this axis separate from the others.

    Args:
        graph_module: The graph of the call.
        call: The result.
        width: Size of the last axis if the result becomes a slice. None if it stays whole but its axes have another
            order in memory. Results computed from it may have that order too, until a reshape joins axes.
    """
    ahead, visited = [call], {call}
    while ahead:
        node = ahead.pop()
        for user in node.users:
            name = _name(graph_module, user)
            # The schema of a custom operator does not say whether it views its input. Nor do inner graphs.
            if modules.is_foreign(graph_module, user) or "::" in name or modules.graphs_within(graph_module, user):
                return user
            separate = name == "view" and node is call and width is not None and _keeps_last_axis(user, width)
            if name in _STRICT and not separate:
                return user
            if user in visited or modules.measures(user) or _has_own_layout(graph_module, node, user, width):
                continue
            visited.add(user)
            if name in _COPIES and memory.changed_in_place(graph_module, user):
                return user
            if name not in _NEW_MEMORY and not (width is None and name in _COPIES and _joins_axes(node, user)):
                ahead.append(user)
    return None


def _name(graph_module: GraphModule, node: Node) -> str:
    module = modules.called_module(graph_module, node)
    flattens = module is not None and any(isinstance(part, nn.Flatten) for part in module.modules())
    return "flatten" if flattens else modules.operator_name(node)


def _has_own_layout(graph_module: GraphModule, node: Node, user: Node, width: int | None) -> bool:
    """Returns True if the layout of a user's result is independent of its input ``node``."""
    if width is not None:
        return node not in memory.aliased_inputs(graph_module, user)
    module = modules.called_module(graph_module, user)
    return isinstance(module, _CONTIGUOUS_MODULES) or _name(graph_module, user) in _CONTIGUOUS


def _joins_axes(node: Node, reshaped: Node) -> bool:
    """Returns True if a reshape joins axes of at most four.

    If these have another order in memory, it copies.
    """
    before, after = modules.dims(node), modules.dims(reshaped)
    return before is not None and after is not None and after < before <= 4


def _keeps_last_axis(view: Node, width: int) -> bool:
    """Returns True if the trailing sizes of a view multiply to the size of the last axis."""
    sizes = list(view.args[1:])
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)):
        sizes = list(sizes[0])
    value = view.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = list(value.shape)
    if view.kwargs or any(isinstance(size, torch.dtype) for size in sizes):
        return False
    product = 1
    while product != width and sizes and type(size := sizes.pop()) is int and size > 0:
        product *= size
    return product == width
