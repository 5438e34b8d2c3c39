"""Quantizes ONNX files to 8 or 4 bits with ``onnxruntime.quantization``, within the limits of the gates."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from torch import fx

from optexport.cache import keys
from optexport.errors import ConfigError, ExportError, first_line
from optexport.exporters.onnx.exporter import EXTERNAL_DATA_ABOVE, TRANSPOSED
from optexport.job import Job
from optexport.parity.checker import ParityChecker
from optexport.quantization.int8_rows import quantize_rows, used_names
from optexport.quantization.sensitivity import Choice, LayerChoices, gated_cases, layers_in, resolve_keep_float32
from optexport.runtime import runners
from optexport.runtime.devices import WEIGHT_BITS_KEY
from optexport.runtime.runners import Run
from optexport.signature.signature import Batch

# Elements of a weight column, or of a row of the other factor, that share a scale. Of 32, 64, 128 and 256, 128 is the
# fastest on MiniLM (AMD EPYC with AVX512-VNNI). Its cosine similarity is 0.997, that with 32 is 0.999.
_BLOCK = 128
# The same for 4 bits. Of 32, 64 and 128, with and without zero points, 32 with zero points has the smallest error:
# 0.0825 of the norm of MiniLM's weights, against 0.109 for 128 without. The file of a Llama is 14 % larger, and no
# choice is measurably faster (AMD EPYC, 2 cores, AVX512-VNNI; tests/benchmarks/weight_bits.py).
_BLOCK_OF_4_BITS = 32
# Operator types that each precision quantizes. Dynamic convolutions are slow in ONNX Runtime.
OPERATORS = {
    "int8": ("MatMul",),
    "int8-rows": ("MatMul",),
    "int8-blocks": ("MatMul",),
    "int8-static": ("MatMul", "Conv"),
    "int4-blocks": ("MatMul",),
}
# Operator types with weights, besides products of matrices.
_WEIGHTED = ("Conv", "ConvTranspose", "LSTM", "GRU", "RNN")
# Type of values that onnxruntime cannot infer: results of its custom operators.
_OPTIONS = {"DefaultTensorType": onnx.TensorProto.FLOAT}


class Quantizer:
    """Writes copies of an ONNX file in lower precision.

    Args:
        source: ONNX file in float32, unchanged. Temporary files are written to the same folder.
        precision: Precision, one of `OPERATORS`.
        weight_bits: 7, or 8 for processors with VNNI.
        checker: Checker with the reference and the gates.

    Attributes:
        layers: Names of the nodes that can be quantized, by layer.
    """

    def __init__(self, source: Path, precision: str, weight_bits: int, checker: ParityChecker) -> None:
        self._source, self._precision, self._weight_bits, self._checker = source, precision, weight_bits, checker
        self._prepared, self._attempt = source.with_name("prepared.onnx"), source.with_name("attempt.onnx")
        self._batches = [case.batch for case in gated_cases(checker)]
        self.layers = prepare(source, self._prepared, precision, weight_bits)

    def write(self, float32_layers: Collection[str], target: Path) -> None:
        """Writes a copy with all other layers in lower precision.

        Raises:
            ExportError: onnxruntime cannot quantize the file.
        """
        float32 = {layer for unit in float32_layers for layer in layers_in(unit, self.layers)}
        nodes = [node for layer, names in self.layers.items() if layer not in float32 for node in names]
        quantize(self._prepared, target, nodes, self._precision, self._weight_bits, self._batches)

    def choose_layers(self, job: Job, graph_module: fx.GraphModule, choices: LayerChoices) -> Choice:
        """Finds the layers that the gates need in float32.

        Args:
            graph_module: Graph that the file was exported from.
            choices: Choices of the run so far.

        Raises:
            ConfigError: No layer can be quantized, or `precision.keep_float32` names an unknown layer.
            ExportError: onnxruntime cannot quantize the file, or cannot run the result.
            ParityError: No choice of layers passes the gates.
        """

        def make(keep: Collection[str]) -> Iterator[Run]:
            self.write(keep, self._attempt)
            for optimized in (True, False):
                yield runners.open_onnx(self._attempt, list(self._checker.tolerances), optimized=optimized)

        operators = _count_float32_operators(self._source, self._precision)
        if not self.layers and "Conv" in operators:
            raise ConfigError(
                f"{self._precision} lowers linear layers only, and onnx has none",
                location="precision.onnx",
                hint='Write "int8-static", which also lowers convolutions.',
            )
        keep = resolve_keep_float32(job, graph_module, self.layers)
        content = keys.of_file(self._source, "onnx")
        choice = choices.choose(content, "onnx", self._precision, self.layers, keep, make, self._checker)
        choice.float32_operators = operators
        return choice


def _count_float32_operators(source: Path, precision: str) -> Counter[str]:
    """Counts the operators with weights that a precision never lowers, by type."""
    nodes = onnx.load(source, load_external_data=False).graph.node
    return Counter(n.op_type for n in nodes if n.op_type in _WEIGHTED and n.op_type not in OPERATORS[precision])


def prepare(source: Path, target: Path, precision: str, weight_bits: int) -> dict[str, list[str]]:
    """Writes a copy of an ONNX file that is ready for quantization.

    The copy has MatMul and Add in place of Gemm, unique node names, and its purpose in the metadata. It has no recorded
    shapes: onnxruntime infers them again, and rejects recorded ones that it has no rule for.

    Args:
        source: ONNX file; external weights are read from the same folder.
        target: Path of the copy.
        precision: Precision, one of `OPERATORS`.
        weight_bits: 7, or 8 for processors with VNNI.

    Returns:
        The names of the nodes that can be quantized, by the layer that owns their weights.
    """
    model = onnx.load(source)
    model.graph.ClearField("value_info")
    metadata = {"optexport.precision": json.dumps(precision)}
    if weight_bits == 8:
        metadata[WEIGHT_BITS_KEY] = json.dumps(weight_bits)
    for key, text in metadata.items():
        model.metadata_props.add(key=key, value=text)
    _split_gemms(model.graph)
    weights = {w.name: len(w.dims) for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT}
    layers: dict[str, list[str]] = {}
    for index, node in enumerate(model.graph.node):
        node.name = f"{index}_{node.name}"  # node names are optional and need not be unique
        if node.op_type not in OPERATORS[precision] or node.domain != "" or node.input[1] not in weights:
            continue
        # onnxruntime rejects stacked matrices in blocks, and otherwise scales them along the wrong axis.
        if weights[node.input[1]] == 2 or node.op_type == "Conv":
            layers.setdefault(layer_of(node.input[1]), []).append(node.name)
    external = _size(source) > EXTERNAL_DATA_ABOVE
    _remove(target)
    onnx.save(model, target, save_as_external_data=external, location=f"{target.name}.data")
    return layers


def _split_gemms(graph: onnx.GraphProto) -> None:
    """Replaces ``Gemm`` by ``MatMul`` and ``Add``, which ONNX Runtime fuses again.

    onnxruntime's quantization does the same, but transposes a shared weight in place once per layer that uses it.
    """
    constants = {initializer.name: initializer for initializer in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    replaced: set[str] = set()
    for node in graph.node:
        weight = constants.get(node.input[1]) if node.op_type == "Gemm" and node.domain == "" else None
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        is_plain = (
            attributes.get("alpha", 1.0) == 1.0
            and attributes.get("beta", 1.0) == 1.0
            and not attributes.get("transA", 0)
        )
        if weight is None or not is_plain:
            nodes.append(node)
            continue
        name = weight.name
        if attributes.get("transB", 0):
            name = f"{weight.name}{TRANSPOSED}_whole"
            replaced.add(weight.name)
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
    replaced -= used_names(graph)
    for weight in [initializer for initializer in graph.initializer if initializer.name in replaced]:
        graph.initializer.remove(weight)  # ONNX Runtime warns about unused weights


def layer_of(weight: str) -> str:
    """Returns the name of the layer that owns a weight."""
    return re.sub(rf"{re.escape(TRANSPOSED)}(_\w+)?$", "", weight).removesuffix(".weight")


def quantize(
    source: Path, target: Path, nodes: Collection[str], precision: str, weight_bits: int, batches: Sequence[Batch]
) -> None:
    """Writes an ONNX file with some layers in lower precision.

    Args:
        source: File that `prepare` wrote. Calibration ranges are cached in the same folder.
        target: Path of the quantized file.
        nodes: Names of the nodes to quantize; at least one.
        precision: "int8": MatMul with a scale per weight column, and a dynamic scale for the whole other factor.
            "int8-rows": a scale per weight column, and per row of the other factor, whose channels are smoothed.
            "int8-blocks": a scale per block of a weight column, and per block of a row of the other factor.
            "int4-blocks": the same with weights in 4 bits, and a zero point per block of a weight column.
            "int8-static": MatMul and Conv with a scale per column or channel of the weights. The scales of their inputs
            and outputs come from calibration.
        weight_bits: 7, or 8 for processors with VNNI; unused in blocks.
        batches: Calibration inputs.

    Raises:
        ExportError: onnxruntime cannot quantize the file.
    """
    try:
        _remove(target)
        with _silence_logging():
            _QUANTIZERS[precision](source, target, nodes, weight_bits, batches)
            quantized = _list_float32_layers(source, precision) - _list_float32_layers(target, precision)
            if quantized != set(nodes):
                raise ValueError(f"{len(quantized)} layers are quantized (expected {len(nodes)})")
    except Exception as error:  # onnxruntime raises many error types
        raise ExportError(
            f"onnxruntime could not quantize the file: {first_line(error)}",
            location=f"precision.onnx: {precision}",
            hint='Leave "onnx" out of [precision].',
        ) from error


def _quantize_dynamic(source: Path, target: Path, nodes: Collection[str], weight_bits: int, _: Sequence[Batch]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=list(OPERATORS["int8"]),
        per_channel=True,
        weight_type=QuantType.QInt8,
        reduce_range=weight_bits == 7,
        nodes_to_quantize=list(nodes),
        use_external_data_format=_size(source) > EXTERNAL_DATA_ABOVE,
        extra_options=dict(_OPTIONS),
    )


def _quantize_in_blocks(
    source: Path,
    target: Path,
    nodes: Collection[str],
    _weight_bits: int,
    _batches: Sequence[Batch],
    *,
    bits: int,
    block_size: int,
    is_symmetric: bool,
) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(source)
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=bits,
        block_size=block_size,
        is_symmetric=is_symmetric,
        accuracy_level=4,  # rounds the other factor to int8; ONNX Runtime 1.31 is slower if it computes in float32
        nodes_to_exclude=[node.name for node in model.graph.node if node.name not in nodes],
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), _size(source) > EXTERNAL_DATA_ABOVE)


def _quantize_rows(
    source: Path, target: Path, nodes: Collection[str], weight_bits: int, batches: Sequence[Batch]
) -> None:
    model = onnx.load(source)
    quantize_rows(source, model, nodes, weight_bits, batches)
    onnx.save(model, target, save_as_external_data=_size(source) > EXTERNAL_DATA_ABOVE, location=f"{target.name}.data")


def _quantize_static(
    source: Path, target: Path, nodes: Collection[str], weight_bits: int, batches: Sequence[Batch]
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    model = onnx.load(source, load_external_data=False)
    names, remaining = [value.name for value in model.graph.input], iter(batches)

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no type hints
        def get_next(self) -> Mapping[str, Any] | None:
            batch = next(remaining, None)
            return None if batch is None else {name: batch[name].numpy() for name in names}

    activations = ["Relu", "Clip"]  # layer outputs whose activation only clips to the range
    quantize_static(
        source,
        target,
        Reader(),
        op_types_to_quantize=[*OPERATORS["int8-static"], *activations],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=weight_bits == 7,
        nodes_to_exclude=[n.name for n in model.graph.node if n.name not in nodes and n.op_type not in activations],
        use_external_data_format=_size(source) > EXTERNAL_DATA_ABOVE,
        calibration_cache_path=source.with_suffix(".ranges.json"),
        extra_options=dict(_OPTIONS),
    )


_QUANTIZERS: Mapping[str, Callable[[Path, Path, Collection[str], int, Sequence[Batch]], None]] = {
    "int8": _quantize_dynamic,
    "int8-rows": _quantize_rows,
    "int8-blocks": partial(_quantize_in_blocks, bits=8, block_size=_BLOCK, is_symmetric=True),
    "int8-static": _quantize_static,
    "int4-blocks": partial(_quantize_in_blocks, bits=4, block_size=_BLOCK_OF_4_BITS, is_symmetric=False),
}


def _list_float32_layers(path: Path, precision: str) -> set[str]:
    """Returns the names of layers, and of products without weights, that stay in float32."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    restored = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    layers = [node for node in nodes if node.op_type in OPERATORS[precision] and node.domain == ""]
    return {node.name for node in layers if node.input[1] not in restored}


def _remove(path: Path) -> None:
    """Removes an earlier attempt: onnx appends to an existing file of weights."""
    for file in (path, path.with_name(f"{path.name}.data")):
        file.unlink(missing_ok=True)


def _size(path: Path) -> int:
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)


@contextlib.contextmanager
def _silence_logging() -> Iterator[None]:
    """Silences onnxruntime's quantization, which configures the root logger."""
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
