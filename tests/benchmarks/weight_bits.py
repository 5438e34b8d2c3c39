"""Measures block sizes, symmetry and accuracy levels of ONNX Runtime's MatMulNBits, for weights in 4 and 8 bits.

    python -m tests.benchmarks.weight_bits FOLDER [--threads N] [--rounds N]

FOLDER is the folder of tests.benchmarks.generation, with its Llama of 100 million random parameters. All products of
its decoder get weights in blocks. Each file takes turns with the file in float32: prefill of 128 tokens, and one token
after 128. The error of trained weights is measured on MiniLM's linear layers: its norm over the norm of the weights, in
the median layer. Accuracy level 1 computes in float32; level 4 rounds the other factor to 8 bits per block.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import nn

from optexport._utils.platform import machine
from optexport.quantization.int8 import prepare
from tests.benchmarks import workloads
from tests.benchmarks.turns import in_turns

Array = np.ndarray[Any, np.dtype[Any]]
_PAST = 128


def quantize(model: onnx.ModelProto, bits: int, block: int, symmetric: bool, level: int) -> onnx.ModelProto:
    """Returns a copy of a model with the weights of all products in blocks."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantizer = MatMulNBitsQuantizer(copy, bits=bits, block_size=block, is_symmetric=symmetric, accuracy_level=level)
    logging.disable(logging.INFO)  # onnxruntime logs every node
    quantizer.process()
    return quantizer.model.model


def weight_error(weights: list[Array], *choice: Any) -> float:
    """Returns the median relative error of weights [K, N], read back through a product with the identity."""
    errors = []
    for weight in weights:
        rows, columns = weight.shape
        value = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
            "product",
            [value("x", onnx.TensorProto.FLOAT, ["rows", rows])],
            [value("y", onnx.TensorProto.FLOAT, ["rows", columns])],
            [onnx.numpy_helper.from_array(weight, "w")],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        session = onnxruntime.InferenceSession(quantize(model, *choice).SerializeToString())
        (restored,) = session.run(None, {"x": np.eye(rows, dtype=np.float32)})
        errors.append(float(np.linalg.norm(restored - weight) / np.linalg.norm(weight)))
    return statistics.median(errors)


def calls(session: onnxruntime.InferenceSession) -> dict[str, Any]:
    """Returns functions that compute a prefill, and one token after it."""
    ids = np.random.default_rng(0).integers(2, 8_000, (1, _PAST + 1))
    past = [value for value in session.get_inputs() if value.name.startswith("past")]
    empty = {value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32) for value in past}
    prefill = {"input_ids": ids[:, :-1], "attention_mask": np.ones_like(ids[:, :-1]), **empty}
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, prefill), strict=True))
    cached = {name: outputs[name.replace("past_key_values", "present")] for name in empty}
    step = {"input_ids": ids[:, -1:], "attention_mask": np.ones_like(ids), **cached}
    return {"prefill": lambda: session.run(["logits"], prefill), "decode": lambda: session.run(["logits"], step)}


def cosine(one: Array, other: Array) -> float:
    """Returns the smallest cosine of two rows along the last axis."""
    norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    return float(((one * other).sum(-1) / norms).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = arguments.threads, 3
    layers = [layer for layer in workloads._minilm().modules() if isinstance(layer, nn.Linear)]
    weights = [np.ascontiguousarray(layer.weight.detach().numpy().T) for layer in layers]
    with tempfile.TemporaryDirectory() as place:
        prepared = Path(place) / "prepared.onnx"
        prepare(arguments.folder / "optexport" / "decoder" / "model.onnx", prepared, "int8-blocks")
        model = onnx.load(prepared)
    original = calls(onnxruntime.InferenceSession(model.SerializeToString(), options))
    expected = original["prefill"]()[0]
    print(f"{machine()}, {arguments.threads} thread(s), {arguments.rounds} rounds;", end=" ")
    print(f"{model.ByteSize() / 1e6:.0f} MB in float32")
    print("| bits | block | symmetric | level | MB | error of trained weights | smallest cosine of logits", end=" ")
    print("| float32 / this: prefill | decode |")
    print("|---|---|---|---|---|---|---|---|---|")
    for bits, level, block, symmetric in itertools.product((4, 8), (1, 4), (32, 64, 128), (True, False)):
        quantized = quantize(model, bits, block, symmetric, level).SerializeToString()
        own = calls(onnxruntime.InferenceSession(quantized, options))
        similarity = cosine(own["prefill"]()[0], expected)
        cells = []
        for name, call in own.items():
            times = in_turns({"float32": original[name], "own": call}, arguments.rounds)
            ratios = [one / other for one, other in zip(times["float32"], times["own"], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        error = weight_error(weights, bits, block, symmetric, level)
        row = [
            bits,
            block,
            symmetric,
            level,
            f"{len(quantized) / 1e6:.1f}",
            f"{error:.4f}",
            f"{similarity:.4f}",
            *cells,
        ]
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
