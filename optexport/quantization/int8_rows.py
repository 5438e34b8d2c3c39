"""Writes products in int8 with a scale per row of their input, after smoothing its channels.

Each row of an input is divided by its largest magnitude, so that one constant scale fits all rows: a row's result does
not depend on the other rows. Before that, channel j of the input is divided by ``s_j = sqrt(max|X_j| / max|W_j|)`` and
row j of the weight multiplied by it, so that channels with outliers do not take the whole range of 8 bits. This is
SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4 with alpha = 0.5).

The file has ``QuantizeLinear`` and ``DequantizeLinear``, which ONNX Runtime fuses with the product.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from optexport.runtime import runners
from optexport.signature.signature import Batch

Array = npt.NDArray[np.float32]

_INPUT_LEVELS, _ZERO = 127, 128
# Largest magnitude of a weight by its bits. Processors without VNNI saturate the sum of two products, and
# 2 * 255 * 64 < 2**15.
_LEVELS = {7: 64, 8: 127}
_SMALLEST = 1e-20  # replaces the largest magnitude of a row of zeros


def quantize_rows(
    source: Path, model: onnx.ModelProto, nodes: Collection[str], weight_bits: int, batches: Sequence[Batch]
) -> None:
    """Rewrites products of a model in place.

    Args:
        source: File of the model. The largest magnitudes of its channels are cached in the same folder.
        nodes: Names of ``MatMul`` nodes whose second input is a matrix of constants.
        weight_bits: 7 or 8.
        batches: Calibration inputs.
    """
    graph = model.graph
    products = [node for node in graph.node if node.name in nodes]
    weights = {tensor.name: tensor for tensor in graph.initializer}
    matrices = {name: numpy_helper.to_array(weights[name]) for name in {node.input[1] for node in products}}
    smoothing = _list_smoothing(products, matrices, _channel_magnitudes(source, model, batches))
    constants: dict[str, npt.NDArray[Any]] = {
        "int8/last_axis": np.array([-1], np.int64),
        "int8/smallest": np.array(_SMALLEST, np.float32),
        "int8/scale": np.array(1 / _INPUT_LEVELS, np.float32),
        "int8/zero": np.array(_ZERO, np.uint8),
    }
    rewritten: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.name not in nodes:
            rewritten.append(node)
            continue
        name, weight = node.input
        if f"{name}/smoothing" not in constants:
            constants[f"{name}/smoothing"] = 1 / smoothing[name]
            rewritten += _quantize_input(name)
        if f"{weight}/int8" not in constants:
            constants |= _quantize_weight(weight, matrices[weight] * smoothing[name][:, None], _LEVELS[weight_bits])
            parameters = [f"{weight}/{kind}" for kind in ("int8", "scale", "zero")]
            rewritten.append(
                helper.make_node("DequantizeLinear", parameters, [f"{weight}/rounded"], f"{weight}/Dequantize", axis=1)
            )
        rewritten += _multiply(node)
    graph.ClearField("node")
    graph.node.extend(rewritten)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    replaced = {*matrices} - used_names(graph)
    kept = [tensor for tensor in graph.initializer if tensor.name not in replaced]
    graph.ClearField("initializer")
    graph.initializer.extend(kept)


def used_names(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of all values that nodes read, also those in branches, and of the outputs."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            names |= used_names(attribute.g)
    return names


def _quantize_input(name: str) -> Iterator[onnx.NodeProto]:
    """Yields the nodes that smooth, scale and round an input. ``name/row`` is the scale of each row."""
    yield helper.make_node("Mul", [name, f"{name}/smoothing"], [f"{name}/smooth"], f"{name}/Smooth")
    for kind in ("ReduceMax", "ReduceMin"):  # faster than ReduceMax of Abs, which writes all magnitudes
        yield helper.make_node(kind, [f"{name}/smooth", "int8/last_axis"], [f"{name}/{kind}"], f"{name}/{kind}")
    yield helper.make_node("Neg", [f"{name}/ReduceMin"], [f"{name}/negated"], f"{name}/Neg")
    largest = [f"{name}/ReduceMax", f"{name}/negated", "int8/smallest"]
    yield helper.make_node("Max", largest, [f"{name}/row"], f"{name}/Max")
    yield helper.make_node("Div", [f"{name}/smooth", f"{name}/row"], [f"{name}/scaled"], f"{name}/Div")
    parameters = ["int8/scale", "int8/zero"]
    yield helper.make_node("QuantizeLinear", [f"{name}/scaled", *parameters], [f"{name}/int8"], f"{name}/Quantize")
    yield helper.make_node("DequantizeLinear", [f"{name}/int8", *parameters], [f"{name}/rounded"], f"{name}/Dequantize")


def _quantize_weight(name: str, matrix: Array, levels: int) -> dict[str, npt.NDArray[Any]]:
    """Returns a weight in int8, from -levels to levels, with a scale per column, as constants by name."""
    scale = np.maximum(np.abs(matrix).max(0), _SMALLEST) / np.float32(levels)
    return {
        f"{name}/int8": np.round(matrix / scale).astype(np.int8),
        f"{name}/scale": scale.astype(np.float32),
        f"{name}/zero": np.zeros(len(scale), np.int8),
    }


def _multiply(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yields a product of the rounded input with the rounded weight, and the scale of each row."""
    (name, weight), (output,) = node.input, node.output
    product = helper.make_node("MatMul", [f"{name}/rounded", f"{weight}/rounded"], [f"{output}/scaled"], node.name)
    product.metadata_props.extend(node.metadata_props)
    yield product
    yield helper.make_node("Mul", [f"{output}/scaled", f"{name}/row"], [output], f"{node.name}/Mul")


def _list_smoothing(
    products: Sequence[onnx.NodeProto], matrices: Mapping[str, Array], magnitudes: Mapping[str, Array]
) -> dict[str, Array]:
    """Returns the scale of the channels of each input. Inputs that share a weight have one, so that it stays shared."""
    groups: list[set[str]] = []
    for node in products:
        joined = [group for group in groups if group & {*node.input}]
        groups = [group for group in groups if group not in joined] + [{*node.input}.union(*joined)]
    smoothing: dict[str, Array] = {}
    for group in groups:
        channels = np.max([magnitudes[name] for name in sorted(group - {*matrices})], axis=0)
        rows = np.max([np.abs(matrices[name]).max(1) for name in sorted(group & {*matrices})], axis=0)
        smoothing |= dict.fromkeys(group - {*matrices}, _smooth(channels, rows))
    return smoothing


def _smooth(channels: Array, rows: Array) -> Array:
    """Returns the scale of each channel, with the geometric mean 1; 1 for channels without any value."""
    scale, usable = np.ones_like(channels), (channels > 0) & (rows > 0)
    if usable.any():
        logarithms = (np.log(channels[usable]) - np.log(rows[usable])) / 2
        scale[usable] = np.exp(logarithms - logarithms.mean())
    return scale


def _channel_magnitudes(source: Path, model: onnx.ModelProto, batches: Sequence[Batch]) -> Mapping[str, Array]:
    """Returns the largest magnitude of each channel of the inputs of products, by the name of the input."""
    cached = source.with_suffix(".channels.json")
    if not cached.exists():
        matrices = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
        products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
        names = sorted({node.input[0] for node in products})
        outputs = {value.name for value in model.graph.output}
        probe = onnx.load(source, load_external_data=False)
        probe.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in outputs)
        path = source.with_name("probe.onnx")
        onnx.save(probe, path)
        run = runners.open_onnx(path, names, optimized=True)
        largest: dict[str, Array] = {}
        for batch in batches:
            for name, tensor in run(batch).items():
                magnitudes = tensor.abs().reshape(-1, tensor.shape[-1]).numpy()
                values = magnitudes.max(0, initial=0.0, where=np.isfinite(magnitudes))
                largest[name] = np.maximum(largest.get(name, values), values)
        cached.write_text(json.dumps({name: values.tolist() for name, values in largest.items()}), encoding="utf-8")
    stored = json.loads(cached.read_text(encoding="utf-8"))
    return {name: np.array(values, np.float32) for name, values in stored.items()}
