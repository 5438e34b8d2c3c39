"""How results lie in memory, and who needs them to lie there without gaps, in the order of their axes."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import memory, modules


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a new one of its shape, along axes of a single position too."""
    whole = tensor.layout is torch.strided
    return whole and tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


# What works, or works rightly, only on the strides that the whole result of a linear has, or on what is no slice.
_STRICT = (
    *("view", "view_as", "as_strided", "as_strided_", "view_as_complex", "resize_", "resize_as_", "set_", "unfold"),
    *("detach_", "stride", "sym_stride", "storage_offset", "sym_storage_offset", "is_contiguous"),
)
# What may copy where it was a view of the result before. What comes after the latter two is contiguous for sure.
_COPIES = ("reshape", "reshape_as", "flatten", "ravel", "contiguous", "clone")
# What gives contiguous memory however that lies which it is given. Anything else may keep the order of the axes there.
_CONTIGUOUS = ("linear", "layer_norm", "matmul", "bmm", "mm", "addmm", "conv1d", "conv2d", "conv3d", "embedding")
_CONTIGUOUS_MODULES = (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def needs_contiguous(graph_module: GraphModule, call: Node, width: int | None) -> Node | None:
    """A user of a result, or of a view of it, that only works while that is contiguous, if there is one.

    Code that is neither PyTorch's nor Python's own is such a user: it may view what it is given in any shape.

    A slice of the last axis may be viewed in any shape that keeps that axis apart from those before it.

    Args:
        width: The size of the result's last axis; None where it will be whole, but with its axes in another order in
            memory, which what is computed from it may have too: joining them again gives what is contiguous.
    """
    ahead, seen = [call], {call}
    made_anew = _COPIES[-2:]
    while ahead:
        node = ahead.pop()
        for user in node.users:
            module = modules.called_module(graph_module, user)
            flattens = module is not None and any(isinstance(part, nn.Flatten) for part in module.modules())
            name = "flatten" if flattens else modules.operator_name(user)
            # Of a foreign operator the schema does not tell; of a graph, what it does with what it is given.
            if modules.is_foreign(graph_module, user) or "::" in name or modules.graphs_within(graph_module, user):
                return user
            apart = name == "view" and node is call and width is not None and _keeps_last_axis(user, width)
            if name in _STRICT and not apart:
                return user
            if width is None:
                ends = isinstance(module, _CONTIGUOUS_MODULES) or name in _CONTIGUOUS
            else:
                ends = node not in memory.handed_on(graph_module, user)
            if user in seen or modules.measures(user) or ends:
                continue
            seen.add(user)
            if name in _COPIES and memory.changed_in_place(graph_module, user):
                return user
            if name not in made_anew and not (width is None and name in _COPIES and _joins_axes(node, user)):
                ahead.append(user)
    return None


def _joins_axes(node: Node, reshaped: Node) -> bool:
    """Whether a reshape joins axes of up to four: if two of these are in another order in memory, it makes a copy."""
    before, after = modules.dims(node), modules.dims(reshaped)
    return before is not None and after is not None and after < before <= 4


def _keeps_last_axis(view: Node, width: int) -> bool:
    """Whether the sizes at the end of a view's shape multiply to the size of the last axis."""
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
