"""Exports ONNX with ``torch.onnx`` under the patches of transformers."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import fx

from optexport.errors import ExportError, first_line
from optexport.exporters.flat_graph import FlatGraph
from optexport.exporters.graph_export import to_program
from optexport.exporters.onnx import (
    complex_numbers,
    fourier,
    int64,
    max_pool,
    recurrent,
    sigmoid,
    transformers_fixes,
    where,
)
from optexport.exporters.onnx import passes as onnx_passes
from optexport.exporters.onnx.crash_check import check_no_crash
from optexport.exporters.onnx.faster_torch_onnx import reusing_torchlib, skipping_needless_decomposition
from optexport.exporters.onnx.opsets import ATTENTION_OPSET, FALLBACK_OPSET
from optexport.exporters.onnx.refusals import as_refusal
from optexport.exporters.onnx.replacements.table import replace_operators
from optexport.signature.signature import Signature, as_argument, as_arguments
from optexport.transformations.analysis import effects

# Weights above this size in bytes go to a separate file; protobuf's limit is 2 GB.
EXTERNAL_DATA_ABOVE = 1 << 30
# Suffix for the name of a weight that a file stores transposed.
TRANSPOSED = ".transposed"


# The conversions of each graph by opset, because files with the same opset share one.
_conversions: weakref.WeakKeyDictionary[FlatGraph, dict[int | None, onnx_ir.Model]] = weakref.WeakKeyDictionary()


def convert_graph(graph: FlatGraph, passes: Sequence[str]) -> onnx_ir.Model:
    """Converts a graph to an ONNX model, once for each opset. The model must not be changed.

    Raises:
        ExportError: As for `convert`.
    """
    opset, models = choose_opset(graph.flat, passes, graph.opset), _conversions.setdefault(graph, {})
    if opset not in models:
        models[opset] = convert(graph.flat, graph.signature, graph.example, opset)
    return models[opset]


def choose_opset(graph_module: fx.GraphModule, passes: Sequence[str], opset: int | None) -> int | None:
    """Returns the requested opset, or by default one that the format passes can use."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    has_attention = bool(graph_module.graph.find_nodes(op="call_function", target=attention))
    return ATTENTION_OPSET if opset is None and "attention" in passes and has_attention else opset


def convert(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor], opset: int | None = None
) -> onnx_ir.Model:
    """Converts a graph to an ONNX model with the signature's names and dynamic axes.

    Args:
        graph_module: Flat graph: tensors in, a tuple of tensors out. Not changed.
        example: Inputs at the traced sizes, by name.
        opset: Opset of the model; ``torch.onnx`` chooses one by default.

    Raises:
        ExportError: ONNX lacks an operator of the graph, or ``torch.onnx`` writes another opset.
    """
    try:
        model = _convert(graph_module, signature, example, opset)
    except Exception as error:  # torch.onnx wraps errors in several types
        other = None if opset is not None else FALLBACK_OPSET
        refusal = as_refusal(error, lambda: _try_opset(graph_module, signature, example, other))
        if refusal is error:
            raise
        raise refusal from error
    if opset is not None and (written := model.opset_imports.get("")) != opset:
        raise ExportError(
            f"torch.onnx wrote opset {written} instead of {opset}",
            location="export.opset",
            hint="Set export.opset to a version that torch.onnx supports, or remove it.",
        )
    return model


def write(
    model: onnx_ir.Model,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    passes: Sequence[str] = (),
    external_data_above: int = EXTERNAL_DATA_ABOVE,
) -> None:
    """Writes an ONNX file.

    Args:
        model: Not changed.
        metadata: Entries of the model's ``metadata_props``, each value as JSON.
        passes: Names of `optexport.exporters.onnx.format`; names of other formats are ignored.
        external_data_above: Size in bytes above which the weights go to ``<path>.data``.

    Raises:
        ExportError: A format pass fails, ``onnx.checker`` rejects the file, or the file crashes ONNX Runtime.
    """
    model = onnx_passes.apply_passes(model.clone(), passes)
    model.metadata_props.update({key: json.dumps(value, sort_keys=True) for key, value in (metadata or {}).items()})
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    onnx_ir.save(model, path, external_data=f"{path.name}.data" if size > external_data_above else None)
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ExportError(
            f"onnx.checker rejects the file: {first_line(error)}".replace(f"{path.parent}{os.sep}", ""),
            location=path.name,
            hint="This is a bug in optexport. Please report it with the config.",
        ) from error
    check_no_crash(path, {node.op_type for node in model.graph.all_nodes()})


def _try_opset(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor], opset: int | None
) -> int | None:
    """Returns the opset of a model if the conversion with the given opset succeeds."""
    try:
        return _convert(graph_module, signature, example, opset).opset_imports[""]
    except Exception:  # as many types as in `convert`; the first error is the one to show
        return None


def _convert(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor], opset: int | None
) -> onnx_ir.Model:
    with transformers_fixes.onnx_patches(), reusing_torchlib(), skipping_needless_decomposition():
        return _convert_patched(graph_module, signature, example, opset)


def _convert_patched(
    graph_module: fx.GraphModule, signature: Signature, example: Mapping[str, torch.Tensor], opset: int | None
) -> onnx_ir.Model:
    patched = copy.copy(graph_module)
    patched.graph = copy.deepcopy(graph_module.graph)
    _copy_output_aliases(patched.graph)
    replace_operators(patched, has_attention=opset is not None and opset >= ATTENTION_OPSET)
    patched.recompile()
    program = fourier.replace_with_matmuls(to_program(patched, signature, example))
    program = complex_numbers.replace_with_pairs(program, signature, example)
    if _writes_into_view(program.graph_module):
        program = program.run_decompositions({})
    transformers_fixes.fix_for_onnx(program)
    converted = torch.onnx.export(
        program,
        args=(),
        kwargs=as_arguments({spec.name: example[spec.name] for spec in signature.inputs}),
        input_names=[spec.name for spec in signature.inputs],
        output_names=[spec.name for spec in signature.outputs],
        dynamic_shapes={
            as_argument(spec.name): {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
            for spec in signature.inputs
        },
        custom_translation_table=transformers_fixes.onnx_translations(),
        opset_version=opset,
        verbose=False,
        optimize=False,  # its rewriting treats a constant of 1e-8 as zero
    )
    assert converted is not None
    transposed = _transposed_weights(converted.model.graph)
    onnxscript.optimizer.fold_constants(converted.model, should_fold=recurrent.should_fold)
    _name_transposed(converted.model.graph, transposed)
    onnxscript.optimizer.remove_unused_nodes(converted.model)
    transformers_fixes.fix_onnx_model(converted)
    _expand_masks(converted.model)
    int64.fix(converted.model)
    max_pool.fix(converted.model)
    sigmoid.fix(converted.model)
    where.fix(converted.model)
    _name_outputs(converted.model.graph, [spec.name for spec in signature.outputs])
    # Node metadata contains paths of the machine that built the file.
    return ClearMetadataAndDocStringPass()(converted.model).model


def _copy_output_aliases(graph: fx.Graph) -> None:
    """Copies outputs that are another name of a tensor; transformers removes that name, which ``torch.onnx`` needs."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (node,))
            output.replace_input_with(node, copied)


def _writes_into_view(graph_module: fx.GraphModule) -> bool:
    """Returns True if a graph changes a tensor through a view.

    The fixes for ONNX replace a write by its functional form and do not write the result back to the tensor viewed.
    """
    written = {target for node in graph_module.graph.nodes for target in effects.mutated_inputs(graph_module, node)}
    return any(
        torch._C._is_alias_of(node.meta["val"], source.meta["val"])  # type: ignore[attr-defined]  # its stubs lack it
        for node in written
        if not effects.mutated_inputs(graph_module, node)  # an in-place call returns its argument, whole
        for source in node.all_input_nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and isinstance(source.meta.get("val"), torch.Tensor)
    )


def _transposed_weights(graph: onnx_ir.Graph) -> list[tuple[onnx_ir.Node, str]]:
    """Returns products by a transposed weight, each with the weight's name."""
    products = []
    for node in graph.all_nodes():
        source = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        weight = source.inputs[0] if source is not None and source.op_type == "Transpose" else None
        if weight is not None and weight.is_initializer() and weight.name is not None:
            products.append((node, weight.name))
    return products


def _name_transposed(graph: onnx_ir.Graph, weights: Sequence[tuple[onnx_ir.Node, str]]) -> None:
    """Names folded weights after their sources, so that a file shows its layers."""
    for node, name in weights:
        value = node.inputs[1]
        if value is not None and value.is_initializer() and TRANSPOSED not in (value.name or ""):
            duplicates = sum(initializer.startswith(f"{name}{TRANSPOSED}") for initializer in graph.initializers)
            value.name = f"{name}{TRANSPOSED}" + (f"_{duplicates}" if duplicates else "")


def _expand_masks(model: onnx_ir.Model) -> None:
    """Expands masks of Attention to one row per query and one column per key.

    The operator's specification allows broadcast masks, but ONNX Runtime 1.31 raises.
    """
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Attention" or node.domain or len(node.inputs) < 4 or node.inputs[3] is None:
            continue
        query, key, _, mask = node.inputs[:4]
        assert query is not None and key is not None and mask is not None
        if mask.shape is not None and query.shape is not None and key.shape is not None:
            expanded_shape = [query.shape[-2], key.shape[-2]]
            if list(mask.shape[-2:]) == expanded_shape and None not in expanded_shape:
                continue
        tape = onnx_ir.tape.Tape()
        rows, columns = (tape.op("Shape", [value], {"start": -2, "end": -1}) for value in (query, key))
        expanded = tape.op("Expand", [mask, tape.op("Concat", [rows, columns], {"axis": 0})])
        assert node.graph is not None
        node.graph.insert_before(node, list(tape.nodes))
        node.replace_input_with(3, expanded)


def _name_outputs(graph: onnx_ir.Graph, names: Sequence[str]) -> None:
    """Names the outputs and renames inner values with the same names."""
    outputs = dict(zip(graph.outputs, names, strict=True))
    inner = [value for node in graph.all_nodes() for value in node.outputs] + list(graph.initializers.values())
    for value in inner:
        if value not in outputs and value.name in names:
            value.name = f"{value.name}/inner"
    for value, name in outputs.items():
        value.name = name
