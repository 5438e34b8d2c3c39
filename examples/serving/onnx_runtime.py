"""Runs a bundle's ONNX file with ONNX Runtime, without optexport, torch and transformers.

    pip install numpy onnxruntime safetensors
    python examples/serving/onnx_runtime.py examples/build/minilm

It runs every stored case of the bundle and prints the distance of each answer from the original's.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from safetensors.numpy import load_file


def main(bundle):
    bundle = Path(bundle)
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    stored = load_file(bundle / "reference.safetensors")
    path = next(artifact["path"] for artifact in manifest["artifacts"] if artifact["format"] == "onnx")
    session = onnxruntime.InferenceSession(bundle / path, providers=["CPUExecutionProvider"])
    names = [output["name"] for output in manifest["outputs"]]
    for number, case in enumerate(manifest["reference_cases"]):
        inputs = {value.name: stored[f"{number}.inputs.{value.name}"] for value in session.get_inputs()}
        for name, answer in zip(names, session.run(names, inputs), strict=True):
            expected = stored[f"{number}.outputs.{name}"].astype("float64")
            distance = np.abs(answer - expected).max(initial=0.0)
            print(f"{case}: {name} {list(answer.shape)}: {distance:.2g} from the original")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
