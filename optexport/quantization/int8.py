"""Lowers the layers of an ONNX file to int8, by ``onnxruntime.quantization``."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from optexport.errors import ExportError, first_line
from optexport.exporters.onnx.exporter import EXTERNAL_DATA_ABOVE, TRANSPOSED
from optexport.signature.signature import Batch

# Elements of a row, or of a column of weights, that share a scale; of 32, 64, 128 and 256 the one that was fastest
# on MiniLM (AMD EPYC with AVX512-VNNI), its cosine being 0.997 where that of 32 was 0.999.
_BLOCK = 128
# What layers are, by the way in which they are lowered; dynamic convolutions are slow in ONNX Runtime.
OPERATORS = {"int8": ("MatMul",), "int8-blocks": ("MatMul",), "int8-static": ("MatMul", "Conv")}
# Of eight, processors without instructions for such products (VNNI) cut off sums of two: a file that was proven on one
# with them would give other numbers there.
_SEVEN_BITS = True
# What onnxruntime infers no type for is the result of an operator of its own.
_OPTIONS = {"DefaultTensorType": onnx.TensorProto.FLOAT}


def prepare(source: Path, target: Path, precision: str) -> dict[str, list[str]]:
    """Writes a copy of an ONNX file to quantise.

    Its layers are products and sums, its nodes have names, and it says what it is made for. What the file says of
    shapes is left out: onnxruntime's quantisation infers it again, and refuses what it has no rule for.

    Args:
        source: Its weights, where they lie in a file of their own, are read from there.

    Returns:
        The names of the nodes that can be lowered, by the layer whose weights they hold.
    """
    model = onnx.load(source)
    model.graph.ClearField("value_info")
    entry = model.metadata_props.add()
    entry.key, entry.value = "optexport.precision", json.dumps(precision)
    _split_gemms(model.graph)
    weights = {w.name: len(w.dims) for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT}
    layers: dict[str, list[str]] = {}
    for index, node in enumerate(model.graph.node):
        node.name = f"{index}_{node.name}"  # a name alone need not be there, nor be one node's own
        if node.op_type not in OPERATORS[precision] or node.domain != "" or node.input[1] not in weights:
            continue
        # A stack of matrices onnxruntime refuses to quantise in blocks, and otherwise scales along the wrong axis.
        if weights[node.input[1]] == 2 or node.op_type == "Conv":
            layers.setdefault(layer_of(node.input[1]), []).append(node.name)
    external = model.ByteSize() > EXTERNAL_DATA_ABOVE
    onnx.save(model, target, save_as_external_data=external, location=f"{target.name}.data")
    return layers


def _split_gemms(graph: onnx.GraphProto) -> None:
    """Writes ``Gemm`` as ``MatMul`` and ``Add``, which ONNX Runtime computes as one again.

    onnxruntime's quantisation does so too, but transposes a weight in place once for each layer that shares it.
    """
    constants = {initializer.name: initializer for initializer in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        weight = constants.get(node.input[1]) if node.op_type == "Gemm" and node.domain == "" else None
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        plain = given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
        if weight is None or not plain:
            nodes.append(node)
            continue
        name = weight.name
        if given.get("transB", 0):
            name = f"{weight.name}{TRANSPOSED}_whole"
            if name not in constants:
                constants[name] = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight).T.copy(), name)
                graph.initializer.append(constants[name])
        has_bias = len(node.input) > 2 and bool(node.input[2])
        product = f"{node.output[0]}/product" if has_bias else node.output[0]
        nodes.append(onnx.helper.make_node("MatMul", [node.input[0], name], [product], f"{node.name}/MatMul"))
        if has_bias:
            nodes.append(onnx.helper.make_node("Add", [product, node.input[2]], list(node.output), f"{node.name}/Add"))
    del graph.node[:]
    graph.node.extend(nodes)


def layer_of(weight: str) -> str:
    """The layer that a weight of a file belongs to."""
    return re.sub(rf"{re.escape(TRANSPOSED)}(_\w+)?$", "", weight).removesuffix(".weight")


def quantize(source: Path, target: Path, nodes: Collection[str], precision: str, batches: Sequence[Batch]) -> None:
    """Writes an ONNX file with some of its layers in int8.

    Args:
        source: A file that `prepare` wrote. What is found by calibration is kept beside it for the next time.
        nodes: The names of the nodes of the layers; at least one.
        precision: "int8": products have a scale for each column of the weights, and one for all of the other factor,
            found when it is run. "int8-blocks": a scale for each block of a column, and of a row of the other factor.
            "int8-static": products and convolutions have a scale for each column, or channel, of the weights, and one
            for all of what they are given and give, found by calibration.
        batches: The inputs to calibrate on.

    Raises:
        ExportError: onnxruntime cannot quantise the file.
    """
    try:
        with _without_logging():
            _QUANTIZERS[precision](source, target, nodes, batches)
            found = _in_float32(source, precision) - _in_float32(target, precision)
            if found != set(nodes):
                raise ValueError(f"it quantised {len(found)} layers, where {len(nodes)} were to be")
    except Exception as error:  # it raises kinds of many
        raise ExportError(
            f"onnxruntime could not quantise it: {first_line(error)}",
            location=f"precision.onnx: {precision}",
            hint='Leave "onnx" out of [precision].',
        ) from error


def _dynamic(source: Path, target: Path, nodes: Collection[str], _: Sequence[Batch]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=list(OPERATORS["int8"]),
        per_channel=True,
        weight_type=QuantType.QInt8,
        reduce_range=_SEVEN_BITS,
        nodes_to_quantize=list(nodes),
        use_external_data_format=_size(source) > EXTERNAL_DATA_ABOVE,
        extra_options=dict(_OPTIONS),
    )


def _in_blocks(source: Path, target: Path, nodes: Collection[str], _: Sequence[Batch]) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(source)
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=8,
        block_size=_BLOCK,
        is_symmetric=True,
        accuracy_level=4,  # the other factor is computed with in int8 too
        nodes_to_exclude=[node.name for node in model.graph.node if node.name not in nodes],
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), _size(source) > EXTERNAL_DATA_ABOVE)


def _static(source: Path, target: Path, nodes: Collection[str], batches: Sequence[Batch]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    model = onnx.load(source, load_external_data=False)
    names, left = [value.name for value in model.graph.input], iter(batches)

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
        def get_next(self) -> Mapping[str, Any] | None:
            batch = next(left, None)
            return None if batch is None else {name: batch[name].numpy() for name in names}

    activations = ["Relu", "Clip"]  # of what a layer gives, where they are no more than the ends of its range
    quantize_static(
        source,
        target,
        Reader(),
        op_types_to_quantize=[*OPERATORS["int8-static"], *activations],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=_SEVEN_BITS,
        nodes_to_exclude=[n.name for n in model.graph.node if n.name not in nodes and n.op_type not in activations],
        use_external_data_format=_size(source) > EXTERNAL_DATA_ABOVE,
        calibration_cache_path=source.with_suffix(".ranges.json"),
        extra_options=dict(_OPTIONS),
    )


_QUANTIZERS: Mapping[str, Callable[[Path, Path, Collection[str], Sequence[Batch]], None]] = {
    "int8": _dynamic,
    "int8-blocks": _in_blocks,
    "int8-static": _static,
}


def _in_float32(path: Path, precision: str) -> set[str]:
    """The names of the layers of a file, and of products without weights, that are computed in float32."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    restored = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    layers = [node for node in nodes if node.op_type in OPERATORS[precision] and node.domain == ""]
    return {node.name for node in layers if node.input[1] not in restored}


def _size(path: Path) -> int:
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Keeps onnxruntime's quantisation, which sets up the root logger and tells of every node, from doing so."""
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
