"""Measures attention's two products in int8 on MiniLM: speed over float32, and cosines of real sentences.

    python -m tests.benchmarks.attention_int8 [--rounds 12] [--threads 1]

The file is a plain export of opset 20, in which attention is no operator of its own. ONNX Runtime's `quantize_dynamic`
quantizes both factors of every product without weights, with one scale for each tensor; everything else stays in
float32. The cosines are from the 300 sentences of tests.benchmarks.quantization that no choice depends on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from optexport._utils.platform import machine
from optexport.bench.artifact import Artifact, file_size
from optexport.bench.measure import measure
from optexport.bench.turns import Settings
from tests.benchmarks import workloads
from tests.benchmarks.quantization import artifacts, cosines, export, make_workloads

SHAPES = ((1, 16), (8, 128), (2, 512))


def lower_attention(artifact: Artifact, path: Path) -> Artifact:
    """Writes a file whose products without weights are in int8."""
    model = onnx.load(artifact.path)
    weights = {initializer.name for initializer in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and not weights & {*node.input}]
    for index, node in enumerate(products):
        node.name = f"attention_product_{index}"
    assert len(products) == 12, "MiniLM has six layers with two products each"
    named = path.with_name("named.onnx")
    onnx.save(model, named)
    quantize_dynamic(
        named,
        path,
        nodes_to_quantize=[node.name for node in products],
        weight_type=QuantType.QUInt8,
        extra_options={"MatMulConstBOnly": False},
    )
    lowered = onnx.load(path).graph.node
    assert sum(node.op_type == "MatMulInteger" for node in lowered) == len(products)
    return replace(artifact, name="attention in int8", path=path, size=file_size(path, "onnx"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OPTEXPORT_CACHE"] = ""
    torch.set_num_threads(arguments.threads)
    print(f"{machine()}, {arguments.threads} thread(s), {arguments.rounds} rounds\n", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = artifacts(export(folder, "plain", ["onnx"], recipe={}, opset=20), "plain")["onnx"]
        lowered = lower_attention(plain, folder / "lowered.onnx")
        tokens, embeddings = cosines(lowered, workloads._minilm())
        print(f"smallest cosine: {tokens:.4f} (tokens), {embeddings:.4f} (embeddings)", flush=True)
        settings = Settings(arguments.threads, arguments.rounds)
        for pair in measure([plain, lowered], make_workloads(folder, SHAPES), [(lowered, plain)], settings).comparisons:
            speed = pair.comparison
            shape = next(iter(pair.workload.sizes))
            print(f"{shape}: float32 / int8 {speed.speedup:.2f} ({speed.low:.2f} to {speed.high:.2f})")


if __name__ == "__main__":
    main()
