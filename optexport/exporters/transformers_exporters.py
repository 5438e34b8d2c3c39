"""The one door to ``transformers.exporters``, which its authors call experimental.

It carries the patches that several hundred architectures need before ``torch.export`` and ``torch.onnx.export`` take
them. Whatever moves there with a new version of transformers is mended here and nowhere else.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from torch import fx
from torch.export import ExportedProgram
from transformers import AttentionInterface, PreTrainedModel, exporters, masking_utils
from transformers.exporters import DynamoConfig, DynamoExporter, exporter_dynamo, onnxruntime_fusions
from transformers.exporters import exporter_onnx as _onnx
from transformers.exporters import utils as _utils
from transformers.exporters.utils import (
    apply_fx_node_fixes,
    apply_patches,
    decompose_for_generation,
    precompute_export_inputs,
)

from optexport.exporters.onnx import functions as onnx_functions
from optexport.exporters.onnx.erfinv import inverse_of_erf
from optexport.exporters.onnx.translations import TRANSLATIONS, as_int64, exactly, op
from optexport.signature.arguments import held_tensors
from optexport.tracing.patches import functions as patches_functions
from optexport.tracing.patches.expert_loops import over_all_experts

aten = torch.ops.aten

# Where the exporters' own code lies: no line of it is a model's.
FOLDER = Path(str(exporters.__file__)).parent


# The ONNX patches replace Python functions while a model is traced. A graph that already holds the ATen operator
# passes them by, and some of the files are then wrong (rows that mask every key, for one): so these operators are
# turned into calls of the Python function again before the graph is exported a second time.
_PATCHED_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: onnx_functions.attention,
    aten.where.self: lambda *a: torch.where(*a),
    aten.where.ScalarOther: lambda *a: torch.where(*a),
    aten.where.ScalarSelf: lambda *a: torch.where(*a),
    aten.where.Scalar: lambda *a: torch.where(*a),
    aten.unsqueeze.default: lambda *a: torch.unsqueeze(*a),
    aten.split.Tensor: lambda *a: torch.split(*a),
    aten.chunk.default: lambda *a: torch.chunk(*a),
    aten.roll.default: onnx_functions.rolled,
    aten.exp.default: lambda *a: torch.exp(*a),
    aten.masked_scatter.default: onnx_functions.masked_scatter,
    aten.squeeze.default: onnx_functions.squeeze,
    aten.squeeze.dim: onnx_functions.squeeze,
    aten.squeeze.dims: onnx_functions.squeeze,
    aten.adaptive_avg_pool1d.default: onnx_functions.average_of_windows,
    aten.adaptive_avg_pool2d.default: onnx_functions.average_of_windows,
    aten.adaptive_avg_pool3d.default: onnx_functions.average_of_windows,
    aten.adaptive_max_pool1d.default: onnx_functions.largest_of_windows,
    aten.adaptive_max_pool2d.default: onnx_functions.largest_of_windows,
    aten.adaptive_max_pool3d.default: onnx_functions.largest_of_windows,
    aten.upsample_nearest1d.vec: lambda *a: onnx_functions.nearest(aten.upsample_nearest1d.vec, *a),
    aten.upsample_nearest2d.vec: lambda *a: onnx_functions.nearest(aten.upsample_nearest2d.vec, *a),
    aten.upsample_nearest3d.vec: lambda *a: onnx_functions.nearest(aten.upsample_nearest3d.vec, *a),
    aten.cummax.default: lambda *a: onnx_functions.running(torch.cummax, *a),
    aten.cummin.default: lambda *a: onnx_functions.running(torch.cummin, *a),
    aten.searchsorted.Tensor: lambda *a, **kw: torch.searchsorted(*a, **kw),
    aten.histc.default: onnx_functions.histogram,
    aten.log_sigmoid.default: onnx_functions.log_sigmoid,
    aten.erfinv.default: inverse_of_erf,
    aten.logaddexp.default: onnx_functions.logaddexp,
    aten.logaddexp2.default: onnx_functions.logaddexp2,
    aten.remainder.Tensor: onnx_functions.remainder,
    aten.remainder.Scalar: onnx_functions.remainder,
    aten.remainder.Scalar_Tensor: onnx_functions.remainder,
    aten.scatter_reduce.two: onnx_functions.scattered,
    aten.div.Tensor_mode: onnx_functions.divided,
    aten.div.Scalar_mode: onnx_functions.divided,
    aten.floor_divide.default: lambda *a: onnx_functions.divided(*a, rounding_mode="floor"),
    aten.argsort.stable: lambda x, **how: torch.sort(x, **how)[1],
    aten.fmod.Tensor: onnx_functions.truncated_remainder,
    aten.fmod.Scalar: onnx_functions.truncated_remainder,
    aten.floor.default: lambda x: onnx_functions.rounded(aten.floor.default, x),
    aten.ceil.default: lambda x: onnx_functions.rounded(aten.ceil.default, x),
    aten.trunc.default: lambda x: onnx_functions.rounded(aten.trunc.default, x),
    aten.round.default: lambda x: onnx_functions.rounded(aten.round.default, x),
    aten.angle.default: onnx_functions.angle,
    aten.fft_fftshift.default: onnx_functions.shifted,
    aten.fft_ifftshift.default: lambda *a: onnx_functions.shifted(*a, back=True),
    aten.bucketize.Tensor: lambda *a, **kw: torch.bucketize(*a, **kw),
}


def holds_transformers(module: torch.nn.Module) -> bool:
    """Whether a module is, or wraps, a model of transformers."""
    return any(isinstance(child, PreTrainedModel) for child in module.modules())


def export_module(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], dynamic_shapes: Mapping[str, Any]
) -> ExportedProgram:
    """Exports a module that needs no patches, as `export_program` exports others; neither it nor inputs are changed."""
    return torch.export.export(
        module,
        args=(),
        kwargs=copy.deepcopy(dict(inputs)),
        dynamic_shapes=dict(dynamic_shapes),
        strict=False,
        # Named ranges are promises: check them when the graph runs instead of refusing to prove them.
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def export_program(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], dynamic_shapes: Mapping[str, Any]
) -> ExportedProgram:
    """Exports a model of transformers under the patches of its architecture; the model itself is not changed."""
    had_forward = "forward" in vars(model)
    try:
        with quiet(), _utils.patch_attributes([*_PATCHES, *_expert_patches(model)]):
            exporter = DynamoExporter()
            program: ExportedProgram = exporter.export(
                model,  # type: ignore[arg-type]  # typed for its own models, and made for modules that hold one too
                dict(inputs),
                DynamoConfig(
                    dynamic=True,
                    dynamic_shapes=dict(dynamic_shapes),
                    prefer_deferred_runtime_asserts_over_guards=True,  # as in export_module
                ),
            ).program
    finally:
        if not had_forward:
            vars(model).pop("forward", None)  # the exporter leaves its bound method behind
    return program


# What stops a trace, leaves calls in it which no format holds, or makes it compute something else than the model.
_PATCHES = [
    (torch.nn.Module, "to", patches_functions.unless_it_is),
    (AttentionInterface, "_global_mapping", patches_functions.of_unknown_length),
    (masking_utils.AttentionMaskInterface, "_global_mapping", patches_functions.that_know_their_padding),
    # Masks that are made under torch.vmap, and how it has them index tensors.
    (masking_utils, "_vmap_expansion_sdpa", _utils._patch_broadcast_mask_expansion),
    (masking_utils, "TransformGetItemToIndex", lambda _: contextlib.nullcontext),
    (masking_utils, "_ignore_bidirectional_mask_sdpa", patches_functions.none_that_hides_nothing),
    (exporter_dynamo, "_reshaped_vision_attention_forward", patches_functions.with_norms_of_heads),
    # Inputs that are computed of others: of a model that is exported all are given, or held.
    (_utils, "precompute_export_inputs", lambda _: lambda *given: None),
]


def _expert_patches(model: torch.nn.Module) -> list[tuple[type, str, Callable[..., Any]]]:
    """Patches of the classes of a model's experts."""
    classes = dict.fromkeys(type(module) for module in model.modules() if type(module).__name__.endswith("Experts"))
    return [(cls, "forward", over_all_experts) for cls in classes]


def computed_outside(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Inputs that a model computes from the values of those given, if it is not given them, as no graph can.

    None are those that it would only compute with another kind of attention. A list stands for an input that is given,
    and of which the model wants numbers.
    """
    given = {**inputs, **held_tensors(model)}
    extended: dict[str, Any] = dict(given)
    with torch.no_grad(), quiet():
        precompute_export_inputs(model, extended)
    return {n: value for n, value in extended.items() if n not in given or (n in inputs and isinstance(value, list))}


def decompose(model: torch.nn.Module, prompt: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """What ``generate`` gives the parts of a model for a prompt, by part: ``prefill`` and ``decode`` of most."""
    had_forward = "forward" in vars(model)
    try:
        with quiet(), torch.no_grad():
            found = decompose_for_generation(model, dict(prompt), multi_token_decode=True)  # type: ignore[arg-type]
    finally:
        if not had_forward:
            vars(model).pop("forward", None)  # as the exporter does, it leaves a bound method behind
    return {name: inputs for name, (_, inputs) in found.items()}


@contextlib.contextmanager
def onnx_patches() -> Iterator[None]:
    """Within it, tracing and ``torch.onnx.export`` give operators that ONNX Runtime computes as torch does."""
    with apply_patches("dynamo"), apply_patches("onnx"), exporting():
        yield


def call_patched_functions(graph_module: fx.GraphModule, *, has_attention: bool) -> None:
    """Retargets, in place, the ATen operators that the ONNX patches know only as Python functions.

    Args:
        has_attention: Whether the opset to export with has an operator for attention.
    """
    functions = {**_PATCHED_FUNCTIONS}
    if not has_attention:
        functions[aten.scaled_dot_product_attention.default] = onnx_functions.attention_by_products
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in functions:
            node.target = functions[node.target]


def fix_for_onnx(program: ExportedProgram) -> None:
    """Replaces, in place, the nodes that ONNX cannot express, or that are written wrongly."""
    apply_fx_node_fixes("onnx", program.graph_module)
    for node in program.graph.find_nodes(op="call_function", target=aten.conv3d.default):
        weight = node.args[1].meta["val"]
        if len(node.args) < 3 or node.args[2] is None:  # onnxscript writes a bias of two dimensions then
            with program.graph.inserting_before(node):
                bias = program.graph.call_function(aten.zeros.default, ([weight.shape[0]],), {"dtype": weight.dtype})
            bias.meta["val"] = weight.new_zeros(weight.shape[0])
            node.args = (*node.args[:2], bias, *node.args[3:])


def onnx_translations() -> dict[Any, Any]:
    """Translations of ATen operators that override those of ``torch.onnx``, for its ``custom_translation_table``."""
    own = {
        aten.index_put.default: _put,
        aten._unsafe_index_put.default: _put,
        aten.masked_fill.Scalar: exactly(_onnx._aten_masked_fill),
    }
    return {**_onnx._ONNX_TRANSLATION_TABLE, **TRANSLATIONS, **own}


def _put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """That of transformers, which reads the values for places outside of a mask too, and there may be no values."""
    indices = [as_int64(index) for index in indices]
    is_mask = indices[0] is not None and indices[0].dtype == onnx_ir.DataType.BOOL
    if is_mask and not accumulate and not _onnx._values_broadcast_to_self(values, self):
        zero = op.CastLike(op.Constant(value_ints=[0]), values)
        values = op.Concat(op.Reshape(values, op.Constant(value_ints=[-1])), zero, axis=0)
    return _onnx._aten_index_put(self, indices, values, accumulate)


def fix_onnx_model(onnx_program: torch.onnx.ONNXProgram) -> None:
    """Replaces, in place, what ONNX Runtime is known to refuse or to compute wrongly."""
    _onnx.apply_onnx_ir_fixes(onnx_program)


def fuse_for_onnxruntime(model: onnx_ir.Model) -> None:
    """Fuses, in place, a file's operators into those that ONNX Runtime has of its own for a CPU."""
    with quiet():
        onnxruntime_fusions.fuse_for_onnxruntime(model, "cpu")


@contextlib.contextmanager
def one_pass(model: torch.nn.Module) -> Iterator[None]:
    """Within it, models return neither a key/value cache nor a loss: one forward pass is exported, and no decoding."""
    configs = [c for child in model.modules() if (c := getattr(child, "config", None)) is not None]
    changed = []
    for config, flag in itertools.product(configs, ("use_cache", "return_loss")):
        if getattr(config, flag, False):
            changed.append((config, flag))
            setattr(config, flag, False)
    try:
        yield
    finally:
        for config, flag in changed:
            setattr(config, flag, True)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Within it, ``torch.export`` is quiet, and looks no results of operators up among earlier ones.

    Of sizes that are symbols that takes longer than to compute them: a small export was seen to take 0.6 to 0.9 times
    the CPU time without.
    """
    with torch.no_grad(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False), quiet():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporters' own chatter (drift of versions, deprecated calls, whole graphs); errors still raise."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            for category in (UserWarning, FutureWarning, DeprecationWarning, RuntimeWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logging.disable(disabled)
