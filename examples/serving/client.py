"""Queries a model behind `mlflow models serve`, with the standard library, NumPy and safetensors.

Needs `[register]` with `name = "minilm"` in the config:

    optexport run examples/minilm.toml
    export MLFLOW_TRACKING_URI=sqlite:///examples/mlflow.db
    mlflow models serve --model-uri models:/minilm@champion --env-manager local --port 5001
    python examples/serving/client.py http://127.0.0.1:5001 examples/build/minilm

It sends the bundle's stored inputs and prints the distance of each answer from the original model's. It exits with 1 if
a distance exceeds a hundredth of the largest value, which means that another model answers.
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def predict(url, inputs):
    """Returns the outputs of the served model.

    Args:
        inputs: Arrays by name. JSON has no dtypes, so ids may be int32 or int64.

    Returns:
        Nested lists by name; `numpy.asarray` turns them into arrays.
    """
    body = json.dumps({"inputs": {name: array.tolist() for name, array in inputs.items()}})
    request = urllib.request.Request(f"{url}/invocations", body.encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


def distance(answer, expected):
    """Returns the largest distance between two arrays of numbers or booleans."""
    return np.abs(answer.astype("float64") - expected.astype("float64")).max(initial=0.0)


def main(url, bundle):
    stored = load_file(Path(bundle) / "reference.safetensors")  # case 0 is the traced one
    inputs = {key.removeprefix("0.inputs."): array for key, array in stored.items() if key.startswith("0.inputs.")}
    wrong = []
    for name, values in predict(url, inputs).items():
        answer, expected = np.asarray(values), stored[f"0.outputs.{name}"]
        error = distance(answer, expected)
        print(f"{name} {list(answer.shape)}: {error:.2g} from the original")
        if error > 0.01 * distance(expected, np.zeros_like(expected)):
            wrong.append(name)
    if wrong:
        sys.exit(f"{', '.join(wrong)}: not the answers of the model in {bundle}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except urllib.error.URLError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    except FileNotFoundError as error:
        sys.exit(f"{sys.argv[2]}: not a bundle: {error}")
