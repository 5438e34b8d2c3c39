"""Asks Triton Inference Server, which serves a bundle of the layout "triton", with the standard library and NumPy.

    tritonserver --model-repository examples/build/minilm/model_repository
    python examples/serving/triton_client.py http://127.0.0.1:8000 examples/build/minilm

It sends every case of inputs that the bundle holds to each of its models, and says how far the answers are from the
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
    """What a model gives.

    Args:
        inputs: Arrays in the order of the model's inputs. One without axes but the batch travels with one more, of 1.

    Returns:
        Arrays by the model's names of its outputs.
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
    length = "Inference-Header-Content-Length"  # of what is JSON; the tensors' bytes follow
    content, headers = ask(f"{url}/v2/models/{model}/infer", body, {length: str(len(text))})
    place = int(headers[length])
    answers = {}
    for output in json.loads(content[:place])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        dtype = DTYPES.get(output["datatype"], output["datatype"].lower())
        answers[output["name"]] = np.frombuffer(content[place : place + size], dtype).reshape(output["shape"])
        place += size
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
            except urllib.error.HTTPError as error:  # as at sizes that a file of fixed shape does not take
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
