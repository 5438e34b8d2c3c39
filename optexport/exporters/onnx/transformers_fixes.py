"""Wraps ``transformers.exporters`` for ONNX; no other file calls it for this format.

transformers calls that package experimental. Adapt to new versions here and in
`optexport.tracing.dynamo_exporter`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir
import torch
from torch import fx
from torch.export import ExportedProgram
from transformers.exporters import exporter_onnx as _onnx
from transformers.exporters import onnxruntime_fusions
from transformers.exporters.utils import apply_fx_node_fixes, apply_patches

from optexport.exporters.onnx import recurrent, replacements
from optexport.exporters.onnx.erfinv import erfinv
from optexport.exporters.onnx.translations import TRANSLATIONS, cast_to_int64, keep_float64, op
from optexport.tracing.dynamo_exporter import exporting, quiet

aten = torch.ops.aten


# The ONNX patches replace Python functions while a model is traced. They have no effect on a graph, which calls ATen
# operators, and its file may be wrong then (for rows that mask every key, for example). So these operators become
# calls of Python functions before the graph is exported again.
_PATCHED_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: replacements.attention,
    aten.where.self: lambda *a: torch.where(*a),
    aten.where.ScalarOther: lambda *a: torch.where(*a),
    aten.where.ScalarSelf: lambda *a: torch.where(*a),
    aten.where.Scalar: lambda *a: torch.where(*a),
    aten.unsqueeze.default: lambda *a: torch.unsqueeze(*a),
    aten.split.Tensor: lambda *a: torch.split(*a),
    aten.chunk.default: lambda *a: torch.chunk(*a),
    aten.roll.default: replacements.roll,
    aten.exp.default: lambda *a: torch.exp(*a),
    aten.masked_scatter.default: replacements.masked_scatter,
    aten.squeeze.default: replacements.squeeze,
    aten.squeeze.dim: replacements.squeeze,
    aten.squeeze.dims: replacements.squeeze,
    aten.adaptive_avg_pool1d.default: replacements.adaptive_avg_pool,
    aten.adaptive_avg_pool2d.default: replacements.adaptive_avg_pool,
    aten.adaptive_avg_pool3d.default: replacements.adaptive_avg_pool,
    aten.adaptive_max_pool1d.default: replacements.adaptive_max_pool,
    aten.adaptive_max_pool2d.default: replacements.adaptive_max_pool,
    aten.adaptive_max_pool3d.default: replacements.adaptive_max_pool,
    aten.upsample_nearest1d.vec: lambda *a: replacements.upsample_nearest(aten.upsample_nearest1d.vec, *a),
    aten.upsample_nearest2d.vec: lambda *a: replacements.upsample_nearest(aten.upsample_nearest2d.vec, *a),
    aten.upsample_nearest3d.vec: lambda *a: replacements.upsample_nearest(aten.upsample_nearest3d.vec, *a),
    aten.cummax.default: lambda *a: replacements.cumulative_extreme(torch.cummax, *a),
    aten.cummin.default: lambda *a: replacements.cumulative_extreme(torch.cummin, *a),
    aten.searchsorted.Tensor: lambda *a, **kw: torch.searchsorted(*a, **kw),
    aten.histc.default: replacements.histogram,
    aten.log_sigmoid.default: replacements.log_sigmoid,
    aten.erfinv.default: erfinv,
    aten.logaddexp.default: replacements.logaddexp,
    aten.logaddexp2.default: replacements.logaddexp2,
    aten.remainder.Tensor: replacements.remainder,
    aten.remainder.Scalar: replacements.remainder,
    aten.remainder.Scalar_Tensor: replacements.remainder,
    aten.scatter_reduce.two: replacements.scatter_reduce,
    aten.div.Tensor_mode: replacements.divide,
    aten.div.Scalar_mode: replacements.divide,
    aten.floor_divide.default: lambda *a: replacements.divide(*a, rounding_mode="floor"),
    aten.argsort.stable: lambda x, **how: torch.sort(x, **how)[1],
    aten.fmod.Tensor: replacements.truncated_remainder,
    aten.fmod.Scalar: replacements.truncated_remainder,
    aten.floor.default: lambda x: replacements.round_floats(aten.floor.default, x),
    aten.ceil.default: lambda x: replacements.round_floats(aten.ceil.default, x),
    aten.trunc.default: lambda x: replacements.round_floats(aten.trunc.default, x),
    aten.round.default: lambda x: replacements.round_floats(aten.round.default, x),
    aten.angle.default: replacements.angle,
    aten.clamp.default: replacements.clamp,
    aten.clamp_.default: replacements.clamp_,
    aten.fft_fftshift.default: replacements.fftshift,
    aten.fft_ifftshift.default: lambda *a: replacements.fftshift(*a, back=True),
    aten.bucketize.Tensor: lambda *a, **kw: torch.bucketize(*a, **kw),
}


@contextlib.contextmanager
def onnx_patches() -> Iterator[None]:
    """Patches tracing and ``torch.onnx`` to use operators that ONNX Runtime computes alike."""
    with apply_patches("dynamo"), apply_patches("onnx"), exporting():
        yield


def call_patched_functions(graph_module: fx.GraphModule, *, has_attention: bool) -> None:
    """Replaces, in place, ATen operators by the Python functions that ONNX patches know.

    Args:
        has_attention: Whether the opset has an operator for attention.
    """
    functions = {**_PATCHED_FUNCTIONS}
    if not has_attention:
        functions[aten.scaled_dot_product_attention.default] = replacements.attention_by_products
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in functions:
            node.target = functions[node.target]


def fix_for_onnx(program: ExportedProgram) -> None:
    """Replaces, in place, nodes that ONNX cannot express or torch writes wrongly."""
    apply_fx_node_fixes("onnx", program.graph_module)
    for node in program.graph.find_nodes(op="call_function", target=aten.conv3d.default):
        weight = node.args[1].meta["val"]
        if len(node.args) < 3 or node.args[2] is None:  # onnxscript writes a two-dimensional bias
            with program.graph.inserting_before(node):
                bias = program.graph.call_function(aten.zeros.default, ([weight.shape[0]],), {"dtype": weight.dtype})
            bias.meta["val"] = weight.new_zeros(weight.shape[0])
            node.args = (*node.args[:2], bias, *node.args[3:])


def onnx_translations() -> dict[Any, Any]:
    """Returns translations for ``custom_translation_table`` of ``torch.onnx``."""
    additions = {
        aten.index_put.default: _index_put,
        aten._unsafe_index_put.default: _index_put,
        aten.masked_fill.Scalar: keep_float64(_onnx._aten_masked_fill),
    }
    return {**_onnx._ONNX_TRANSLATION_TABLE, **TRANSLATIONS, **recurrent.TRANSLATIONS, **additions}


def _index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Extends transformers' translation, which fails if no element is masked."""
    indices = [cast_to_int64(index) for index in indices]
    is_mask = indices[0] is not None and indices[0].dtype == onnx_ir.DataType.BOOL
    if is_mask and not accumulate and not _onnx._values_broadcast_to_self(values, self):
        zero = op.CastLike(op.Constant(value_ints=[0]), values)
        values = op.Concat(op.Reshape(values, op.Constant(value_ints=[-1])), zero, axis=0)
    return _onnx._aten_index_put(self, indices, values, accumulate)


def fix_onnx_model(onnx_program: torch.onnx.ONNXProgram) -> None:
    """Replaces, in place, operators that ONNX Runtime refuses or computes wrongly."""
    _onnx.apply_onnx_ir_fixes(onnx_program)


def fuse_for_onnxruntime(model: onnx_ir.Model) -> None:
    """Fuses, in place, operators of a file into ONNX Runtime's own operators for CPUs."""
    with quiet():
        onnxruntime_fusions.fuse_for_onnxruntime(model, "cpu")
