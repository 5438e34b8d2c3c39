"""Wraps ``transformers.exporters`` for ONNX; no other file calls it for this format.

transformers calls that package experimental. Adapt to new versions here and in
`optexport.tracing.dynamo_exporter`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir
import torch
from torch.export import ExportedProgram
from transformers.exporters import exporter_onnx as _onnx
from transformers.exporters import onnxruntime_fusions
from transformers.exporters.utils import apply_fx_node_fixes, apply_patches

from optexport.exporters.onnx import recurrent
from optexport.exporters.onnx.translations import TRANSLATIONS, cast_to_int64, keep_float64, op
from optexport.tracing.dynamo_exporter import exporting, quiet

aten = torch.ops.aten


@contextlib.contextmanager
def onnx_patches() -> Iterator[None]:
    """Patches tracing and ``torch.onnx`` to use operators that ONNX Runtime computes as torch does."""
    with apply_patches("dynamo"), apply_patches("onnx"), exporting():
        yield


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
