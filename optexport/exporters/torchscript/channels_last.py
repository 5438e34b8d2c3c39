"""Convolutions of images by oneDNN, whose results have their channels last in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from optexport._utils import aten_ops

aten = torch.ops.aten
CONVOLUTION = torch.ops.mkldnn._convolution_pointwise.default

# What gives the same numbers however its inputs lie in memory, and lays its result out as they lie.
_FOLLOWS = {
    *(aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.leaky_relu.default, aten.elu.default),
    *(aten.silu.default, aten.gelu.default, aten.mish.default, aten.hardswish.default, aten.hardsigmoid.default),
    *(aten.sigmoid.default, aten.tanh.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.relu_.default, aten.relu6_.default, aten.hardtanh_.default, aten.silu_.default, aten.hardswish_.default),
    *(aten.hardsigmoid_.default, aten.sigmoid_.default, aten.leaky_relu_.default, aten.add_.Tensor, aten.mul_.Tensor),
    *(aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim),
    *(aten.batch_norm.default, aten.conv2d.default, aten.conv2d.padding, aten.cat.default, CONVOLUTION),
    *(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.constant_pad_nd.default, aten.pad.default),
}
_READS_SIZES_ONLY = {aten.sym_size.int, aten._assert_tensor_metadata.default}


def lay_out(graph: fx.Graph, weights: Mapping[fx.Node, torch.Tensor], scalars: Sequence[float]) -> set[fx.Node]:
    """Calls oneDNN for convolutions of float32, in place, and makes what needs the usual layout copy to it.

    ``aten.conv2d`` computes kernels of 1 x 1 by one thread as a copy and a product of MKL's, and takes the layout of
    its input; oneDNN is faster where the channels lie last, and gives such a result as soon as the weight lies so.

    Args:
        weights: The parameters of the program, by the placeholders that stand for them.
        scalars: What the file's format takes for no numbers.

    Returns:
        The placeholders of the weights that are to lie with their channels last; none where all was left as it was,
        because something is changed in place that a copy could part from what reads it.
    """
    if not all(_is_alone(node) for node in graph.nodes if _changes_in_place(node)):
        return set()
    lowered = [
        node for node in graph.find_nodes(op="call_function", target=aten.conv2d.default) if _fits(node, weights)
    ]
    for node in lowered:
        x, weight, bias, stride, padding, dilation, groups = aten_ops.arguments(node).values()
        node.target, node.kwargs = CONVOLUTION, {}
        node.args = (x, weight, bias, padding, stride, dilation, groups, "none", scalars, "")
    _copy_where_needed(graph, set(lowered))
    return {node.args[1] for node in lowered if isinstance(node.args[1], fx.Node)}


def raise_again(graph: fx.Graph) -> None:
    """Puts the operators of torch back, in place."""
    for node in graph.find_nodes(op="call_function", target=CONVOLUTION):
        x, weight, bias, padding, stride, dilation, groups, *_ = node.args
        node.target, node.args = aten.conv2d.default, (x, weight, bias, stride, padding, dilation, groups)


def _copy_where_needed(graph: fx.Graph, moved: set[fx.Node]) -> None:
    """Copies what may lie with its channels last, ``moved`` and what follows from it, for all that may need another."""
    for node in list(graph.nodes):
        read = [given for given in node.all_input_nodes if given in moved]
        if node in moved or not read or node.target in _READS_SIZES_ONLY:
            continue
        if node.target in _FOLLOWS:
            moved.add(node)
            continue
        for given in read:
            copied = given.next if given.next.target is aten.contiguous.default else None
            if copied is None or copied.args != (given,):
                with graph.inserting_after(given):
                    copied = graph.call_function(aten.contiguous.default, (given,))
                copied.meta = {"val": given.meta["val"].contiguous()}
            node.replace_input_with(given, copied)


def _changes_in_place(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_alone(node: fx.Node) -> bool:
    """Whether what a node changes in place is read by nothing else, and shares its memory with nothing."""
    changed = node.args[0] if node.args else None
    return (
        node.target in _FOLLOWS
        and isinstance(changed, fx.Node)
        and changed.target in _FOLLOWS
        and list(changed.users) == [node]
    )


def _fits(node: fx.Node, weights: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether oneDNN computes a convolution as torch does.

    It takes batches only, reads a bias that is no plain vector wrongly, and lacks float64.
    """
    x, weight, bias, *sizes, _ = aten_ops.arguments(node).values()
    value = weights.get(weight)
    return (
        value is not None
        and value.dtype == x.meta["val"].dtype == torch.float32
        and value.device.type == "cpu"
        and value.numel() > 0
        and x.meta["val"].dim() == 4
        and all(len(size) == 2 and all(isinstance(one, int) for one in size) for size in sizes)
        and all(
            user.target is aten.conv2d.default and aten_ops.arguments(user)["weight"] is weight for user in weight.users
        )
        and (bias is None or (bias in weights and weights[bias].is_contiguous()))
    )
