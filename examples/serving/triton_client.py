"""Queries a bundle with the layout "triton" on Triton Inference Server, with NumPy and safetensors.

    tritonserver --model-repository examples/build/minilm/model_repository
    python examples/serving/triton_client.py http://127.0.0.1:8000 examples/build/minilm

It sends every stored case of the bundle to each of its models and prints the distance of each answer from the
original's.
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

DTYPES = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}


def ask(url, body=None, headers=None):
    with urllib.request.urlopen(urllib.request.Request(url, body, headers or {}), timeout=60) as answer:
        return answer.read(), answer.headers


def predict(url, model, inputs):
    """Returns the outputs of a model as arrays by name.

    Args:
        inputs: Arrays in the order of the model's inputs. An array with only the batch axis gets a second axis of
            size 1.
    """
    described = json.loads(ask(f"{url}/v2/models/{model}")[0])
    arrays = [
        array.reshape(array.shape + (1,) * (len(spec["shape"]) - array.ndim))
        for spec, array in zip(described["inputs"], inputs, strict=True)
    ]
    head = {
        "inputs": [
            {
                "name": spec["name"],
                "datatype": spec["datatype"],
                "shape": array.shape,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for spec, array in zip(described["inputs"], arrays, strict=True)
        ],
        "outputs": [{"name": spec["name"], "parameters": {"binary_data": True}} for spec in described["outputs"]],
    }
    text = json.dumps(head).encode()
    body = b"".join([text, *(array.tobytes() for array in arrays)])
    length = "Inference-Header-Content-Length"  # the bytes of tensors follow the JSON header
    content, headers = ask(f"{url}/v2/models/{model}/infer", body, {length: str(len(text))})
    offset = int(headers[length])
    answers = {}
    for output in json.loads(content[:offset])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        dtype = DTYPES.get(output["datatype"], output["datatype"].lower())
        answers[output["name"]] = np.frombuffer(content[offset : offset + size], dtype).reshape(output["shape"])
        offset += size
    return {spec["name"]: answers[spec["name"]] for spec in described["outputs"]}


def main(url, bundle):
    manifest = json.loads((Path(bundle) / "manifest.json").read_text(encoding="utf-8"))
    stored = load_file(Path(bundle) / "reference.safetensors")
    paths = [Path(artifact["path"]) for artifact in manifest["artifacts"]]
    for model in [path.parts[1] for path in paths if path.parts[0] == "model_repository"]:
        for number, case in enumerate(manifest["reference_cases"]):
            inputs = [stored[f"{number}.inputs.{spec['name']}"] for spec in manifest["inputs"]]
            try:
                answers = predict(url, model, inputs)
            except urllib.error.HTTPError as error:  # for example a size that a file of fixed shape refuses
                print(f"{model}: {case}: {error.read().decode()}")
                continue
            for output, answer in zip(manifest["outputs"], answers.values(), strict=True):
                expected = stored[f"{number}.outputs.{output['name']}"].astype("float64")
                distance = np.abs(answer.reshape(expected.shape) - expected).max(initial=0.0)
                print(f"{model}: {case}: {output['name']} {list(expected.shape)}: {distance:.2g} from the original")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
