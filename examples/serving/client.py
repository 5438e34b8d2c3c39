"""Asks a model that `mlflow models serve` serves, with the standard library, NumPy and safetensors.

With `[register]` and `name = "minilm"` in the config:

    optexport run examples/minilm.toml
    export MLFLOW_TRACKING_URI=sqlite:///examples/mlflow.db
    mlflow models serve --model-uri models:/minilm@champion --env-manager local --port 5001
    python examples/serving/client.py http://127.0.0.1:5001 examples/build/minilm

It sends the inputs that the bundle holds, and says how far the answers are from the original model's. It ends with 1
where one is farther than a hundredth of its largest value, as of another model: what is close the proof decides.
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def predict(url, inputs):
    """What the served model gives.

    Args:
        inputs: Arrays by name. JSON knows numbers and no dtypes, so ids may be int32 or int64.

    Returns:
        Nested lists by name, which `numpy.asarray` makes arrays of.
    """
    body = json.dumps({"inputs": {name: array.tolist() for name, array in inputs.items()}})
    request = urllib.request.Request(f"{url}/invocations", body.encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


def distance(answer, expected):
    """The largest distance of an answer from what the original gave, be they numbers or booleans."""
    return np.abs(answer.astype("float64") - expected.astype("float64")).max(initial=0.0)


def main(url, bundle):
    stored = load_file(Path(bundle) / "reference.safetensors")  # case 0 is what was traced
    inputs = {key.removeprefix("0.inputs."): array for key, array in stored.items() if key.startswith("0.inputs.")}
    far = []
    for name, values in predict(url, inputs).items():
        answer, expected = np.asarray(values), stored[f"0.outputs.{name}"]
        apart = distance(answer, expected)
        print(f"{name} {list(answer.shape)}: {apart:.2g} from the original")
        if apart > 0.01 * distance(expected, np.zeros_like(expected)):
            far.append(name)
    if far:
        sys.exit(f"{', '.join(far)}: no answers of the model in {bundle}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except urllib.error.URLError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    except FileNotFoundError as error:
        sys.exit(f"{sys.argv[2]}: it is no bundle: {error}")
