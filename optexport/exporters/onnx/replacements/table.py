"""The operators that ONNX export replaces, each with its function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from optexport._utils.pooling import adaptive_avg_pool, adaptive_max_pool
from optexport.exporters.onnx.refusals import Function, naming_node
from optexport.exporters.onnx.replacements import (
    arithmetic,
    attention,
    indexing,
    linear_algebra,
    normalization,
    order,
    reductions,
    scatter,
    special_functions,
    upsampling,
)

aten = torch.ops.aten


# The ONNX patches replace Python functions while a model is traced. They have no effect on a graph, which calls ATen
# operators, and its file may be wrong then (for rows that mask every key, for example). So these operators become
# calls of Python functions before the graph is exported again.
_FUNCTIONS: Mapping[Any, Function] = {
    aten.scaled_dot_product_attention.default: attention.attention,
    aten.where.self: lambda *a: torch.where(*a),
    aten.where.ScalarOther: lambda *a: torch.where(*a),
    aten.where.ScalarSelf: lambda *a: torch.where(*a),
    aten.where.Scalar: lambda *a: torch.where(*a),
    aten.split.Tensor: lambda *a: torch.split(*a),
    aten.chunk.default: lambda *a: torch.chunk(*a),
    # A replaced operator may give another memory layout, for which a view that the traced model allows is an error.
    aten.view.default: lambda x, size: x.reshape(size),
    aten.roll.default: indexing.roll,
    aten.masked_scatter.default: indexing.masked_scatter,
    aten.squeeze.default: indexing.squeeze,
    aten.squeeze.dim: indexing.squeeze,
    aten.squeeze.dims: indexing.squeeze,
    aten.adaptive_avg_pool1d.default: adaptive_avg_pool,
    aten.adaptive_avg_pool2d.default: adaptive_avg_pool,
    aten.adaptive_avg_pool3d.default: adaptive_avg_pool,
    aten.adaptive_max_pool1d.default: adaptive_max_pool,
    aten.adaptive_max_pool2d.default: adaptive_max_pool,
    aten.adaptive_max_pool3d.default: adaptive_max_pool,
    aten.upsample_nearest1d.vec: lambda *a: upsampling.upsample_nearest(aten.upsample_nearest1d.vec, *a),
    aten.upsample_nearest2d.vec: lambda *a: upsampling.upsample_nearest(aten.upsample_nearest2d.vec, *a),
    aten.upsample_nearest3d.vec: lambda *a: upsampling.upsample_nearest(aten.upsample_nearest3d.vec, *a),
    aten.cummax.default: lambda *a: order.cumulative_extreme(torch.cummax, *a),
    aten.cummin.default: lambda *a: order.cumulative_extreme(torch.cummin, *a),
    aten.searchsorted.Tensor: lambda *a, **kw: torch.searchsorted(*a, **kw),
    aten.histc.default: scatter.histogram,
    aten.log_sigmoid.default: arithmetic.log_sigmoid,
    aten.erfinv.default: special_functions.erfinv,
    aten.logaddexp.default: arithmetic.logaddexp,
    aten.logaddexp2.default: arithmetic.logaddexp2,
    aten.remainder.Tensor: arithmetic.remainder,
    aten.remainder.Scalar: arithmetic.remainder,
    aten.remainder.Scalar_Tensor: arithmetic.remainder,
    aten.scatter_reduce.two: scatter.scatter_reduce,
    aten.index_reduce.default: scatter.index_reduce,
    aten.bincount.default: scatter.bincount,
    aten.div.Tensor_mode: arithmetic.divide,
    aten.div.Scalar_mode: arithmetic.divide,
    aten.floor_divide.default: lambda *a: arithmetic.divide(*a, rounding_mode="floor"),
    aten.argsort.stable: lambda x, **how: torch.sort(x, **how)[1],
    aten.fmod.Tensor: arithmetic.truncated_remainder,
    aten.fmod.Scalar: arithmetic.truncated_remainder,
    aten.floor.default: lambda x: arithmetic.round_floats(aten.floor.default, x),
    aten.ceil.default: lambda x: arithmetic.round_floats(aten.ceil.default, x),
    aten.trunc.default: lambda x: arithmetic.round_floats(aten.trunc.default, x),
    aten.round.default: lambda x: arithmetic.round_floats(aten.round.default, x),
    aten.clamp.default: arithmetic.clamp,
    aten.fft_fftshift.default: indexing.fftshift,
    aten.fft_ifftshift.default: lambda *a: indexing.fftshift(*a, back=True),
    aten.masked_select.default: indexing.masked_select,
    aten.copy_.default: indexing.copy,
    aten.pad_sequence.default: indexing.pad_sequence,
    aten.kthvalue.default: order.kthvalue,
    aten.median.default: order.median,
    aten.median.dim: order.median_along,
    aten.nanmedian.default: order.nanmedian,
    aten.nanmedian.dim: order.nanmedian_along,
    aten.cumprod.default: order.cumprod,
    aten.inverse.default: linear_algebra.inverse,
    aten.linalg_inv.default: linear_algebra.inverse,
    aten.linalg_solve.default: linear_algebra.solve,
    aten.linalg_solve_triangular.default: linear_algebra.solve_triangular,
    aten.cholesky_solve.default: linear_algebra.cholesky_solve,
    aten.linalg_cholesky.default: linear_algebra.cholesky,
    aten.cholesky.default: linear_algebra.cholesky,
    aten.linalg_slogdet.default: linear_algebra.slogdet,
    aten.slogdet.default: linear_algebra.slogdet,
    aten.cdist.default: linear_algebra.cdist,
    aten._cdist_forward.default: linear_algebra.cdist,
    aten.pdist.default: linear_algebra.pdist,
    aten._pdist_forward.default: linear_algebra.pdist,
    aten.rrelu.default: arithmetic.rrelu,
    aten.fmax.default: arithmetic.fmax,
    aten.fmin.default: arithmetic.fmin,
    aten.hypot.default: arithmetic.hypot,
    aten.copysign.Tensor: arithmetic.copysign,
    aten.copysign.Scalar: arithmetic.copysign,
    aten.lgamma.default: special_functions.lgamma,
    aten.digamma.default: special_functions.digamma,
    aten.instance_norm.default: normalization.instance_norm,
    aten.group_norm.default: normalization.group_norm,
    aten.mean.default: reductions.mean,
    aten.mean.dim: reductions.mean,
    aten.sum.default: reductions.sum_,
    aten.sum.dim_IntList: reductions.sum_,
    aten.bucketize.Tensor: lambda *a, **kw: torch.bucketize(*a, **kw),
}


_WITHOUT_IN_PLACE_FORM = ("squeeze",)  # its in-place form changes a shape


def _in_place_forms() -> dict[Any, Function]:
    """Returns the in-place forms of the replaced operators, such as ``aten.scatter_reduce_.two``."""
    forms = {aten.floor_divide_.Tensor: _write_result(_FUNCTIONS[aten.floor_divide.default])}
    for operator, function in _FUNCTIONS.items():
        name = operator.overloadpacket.__name__
        packet = None if name in _WITHOUT_IN_PLACE_FORM else getattr(aten, f"{name}_", None)
        if packet is not None and operator._overloadname in packet.overloads():
            forms[getattr(packet, operator._overloadname)] = _write_result(function)
    return forms


def _write_result(function: Function) -> Function:
    def write(x: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
        return x.copy_(function(x, *args, **kw))

    return write


_IN_PLACE_FUNCTIONS: Mapping[Any, Function] = _in_place_forms()


def replace_operators(graph_module: fx.GraphModule, *, has_attention: bool) -> None:
    """Replaces operators, in place, by functions that ``torch.onnx`` converts correctly.

    Args:
        has_attention: Whether the opset has an operator for attention.
    """
    functions = {**_IN_PLACE_FUNCTIONS, **_FUNCTIONS}
    if not has_attention:
        functions[aten.scaled_dot_product_attention.default] = attention.attention_by_products
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in functions:
            node.target = naming_node(functions[node.target], node)
