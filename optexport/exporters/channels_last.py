"""Calls oneDNN for convolutions of images, with results in channels-last memory format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from optexport._utils import aten_ops

aten = torch.ops.aten
CONVOLUTION = torch.ops.mkldnn._convolution_pointwise.default

# Operators whose numbers do not depend on the memory format, and whose results have their inputs' format.
_KEEPS_LAYOUT = {
    *(aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.leaky_relu.default, aten.elu.default),
    *(aten.silu.default, aten.gelu.default, aten.mish.default, aten.hardswish.default, aten.hardsigmoid.default),
    *(aten.sigmoid.default, aten.tanh.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.relu_.default, aten.relu6_.default, aten.hardtanh_.default, aten.silu_.default, aten.hardswish_.default),
    *(aten.hardsigmoid_.default, aten.sigmoid_.default, aten.leaky_relu_.default, aten.add_.Tensor, aten.mul_.Tensor),
    *(aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim),
    *(aten.batch_norm.default, aten.conv2d.default, aten.conv2d.padding, aten.cat.default, CONVOLUTION),
    *(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.constant_pad_nd.default, aten.pad.default),
}
# Views. Their results share memory, so an in-place change of one prevents the pass. In a permuted image, channels may
# already be the last axis, and then a copy after the permutation does nothing.
_REORDERS_AXES = {aten.permute.default, aten.transpose.int}
_READS_SIZES_ONLY = {aten.sym_size.int, aten._assert_tensor_metadata.default}


def lay_out(graph: fx.Graph, weights: Mapping[fx.Node, torch.Tensor], scalars: Sequence[float]) -> set[fx.Node]:
    """Calls oneDNN for float32 convolutions, in place, and adds the necessary copies.

    ``aten.conv2d`` computes 1 x 1 kernels with a copy and a single-threaded MKL product, and keeps its input's layout.
    oneDNN is faster in channels-last format, and returns that format if the weight has it.

    Args:
        weights: The program's parameters by their placeholders.
        scalars: Value that the file's format accepts as an empty list of numbers.

    Returns:
        Placeholders of the weights to convert to channels-last format. The set is empty, and the graph unchanged, if a
        copy could separate an in-place change from its readers, or if the model reads strides.
    """
    if not all(_has_no_alias(node) for node in graph.nodes if _changes_in_place(node)) or _reads_strides(graph):
        return set()
    found = graph.find_nodes(op="call_function", target=aten.conv2d.default)
    supported = {node for node in found if _is_supported(node, weights)}
    convolutions = {node for node in supported if _is_only_weight(aten_ops.arguments(node)["weight"], supported)}
    for node in convolutions:
        x, weight, bias, stride, padding, dilation, groups = aten_ops.arguments(node).values()
        node.target, node.kwargs = CONVOLUTION, {}
        node.args = (x, weight, bias, padding, stride, dilation, groups, "none", scalars, "")
    laid_out = {node.args[1] for node in convolutions if isinstance(node.args[1], fx.Node)}
    _copy_where_needed(graph, convolutions)
    return laid_out


def restore_aten(graph: fx.Graph) -> None:
    """Restores the ATen convolutions, in place."""
    for node in graph.find_nodes(op="call_function", target=CONVOLUTION):
        x, weight, bias, padding, stride, dilation, groups, *_ = node.args
        node.target, node.args = aten.conv2d.default, (x, weight, bias, stride, padding, dilation, groups)


def _copy_where_needed(graph: fx.Graph, relaid: set[fx.Node]) -> None:
    """Inserts contiguous copies of ``relaid`` and its followers for readers that may need them."""
    for node in list(graph.nodes):
        sources = [source for source in node.all_input_nodes if source in relaid]
        if node in relaid or not sources or node.target in _READS_SIZES_ONLY or _is_copy(node):
            continue
        if node.target in _KEEPS_LAYOUT | _REORDERS_AXES:
            relaid.add(node)
            continue
        for source in sources:
            copy = source.next
            if not _is_copy(copy) or copy.args != (source,):
                with graph.inserting_after(source):
                    copy = graph.call_function(aten.contiguous.default, (source,))
                copy.meta = {"val": source.meta["val"].contiguous()}
            node.replace_input_with(source, copy)


def _is_only_weight(weight: fx.Node, convolutions: set[fx.Node]) -> bool:
    """Returns True if a tensor is only the weight of these convolutions. Other readers would get its new layout."""
    return all(user in convolutions and aten_ops.arguments(user)["weight"] is weight for user in weight.users)


def _is_copy(node: fx.Node) -> bool:
    """Returns True for a contiguous copy. With a keyword, the copy has another memory format."""
    return node.target is aten.contiguous.default and not node.kwargs


def _reads_strides(graph: fx.Graph) -> bool:
    """Returns True if an operator, here or in a branch, reads its input's memory as if it had the original layout."""
    assert graph.owning_module is not None
    graphs = [graph, *(m.graph for m in graph.owning_module.modules() if isinstance(m, fx.GraphModule))]
    return any("as_strided" in str(node.target) for one in graphs for node in one.nodes if node.op == "call_function")


def _changes_in_place(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _has_no_alias(node: fx.Node) -> bool:
    """Returns True if the changed tensor has no other reader and shares no memory."""
    changed = node.args[0] if node.args else None
    return (
        node.target in _KEEPS_LAYOUT
        and isinstance(changed, fx.Node)
        and changed.target in _KEEPS_LAYOUT
        and list(changed.users) == [node]
    )


def _is_supported(node: fx.Node, weights: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Returns True if oneDNN computes a convolution as torch does, if that holds for all readers of its weight.

    oneDNN takes batches only, misreads a bias that is not a contiguous vector, and lacks float64.
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
        and (bias is None or (bias in weights and weights[bias].is_contiguous()))
    )
