"""Tests a registered model that ``mlflow models serve`` serves, and the example client."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from optexport.tracking.upload import upload_bundle
from tests._helpers import exports, stores
from tests._helpers.servers import Program, serving
from tests.tracking.bundles import bundle, registering

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]

CLIENT = Path(__file__).parents[2] / "examples" / "serving" / "client.py"


@dataclass(frozen=True)
class Served:
    server: Program
    bundle: Path
    store: str

    def ask(self, body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.server.uri}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["predictions"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    store, target = stores.store(folder), bundle(folder, manifest=registering())
    upload_bundle(target, store)
    server = serving("models:/block@champion", store, folder)
    yield Served(server, target, store)
    server.stop()


def test_the_example_client_gets_the_outputs_of_the_original(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, str(CLIENT), served.server.uri, str(served.bundle)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) \[(.*)\]: (\S+) from the original$", done.stdout, re.MULTILINE)
    assert [(name, shape) for name, shape, _ in rows] == [("hidden", "2, 5, 8"), ("longest", "")]
    limits = exports.exported().manifest.parity.bounds
    for name, _, distance in rows:
        # The limit applies to the distance from float64. The original has a distance of one noise floor.
        assert float(distance) <= limits[name].limit + limits[name].floor


def test_the_client_exits_with_1_if_another_model_is_served(served: Served, tmp_path: Path) -> None:
    """The client printed the distances, but exited with 0."""
    changed = Path(shutil.copytree(served.bundle, tmp_path / "other"))
    stored = load_file(changed / "reference.safetensors")
    save_file(
        {k: v + 1 if k == "0.outputs.hidden" else v for k, v in stored.items()}, changed / "reference.safetensors"
    )
    for target, problem in ((changed, "hidden: not the answers of the model in"), (tmp_path / "no", "not a bundle")):
        command = [sys.executable, str(CLIENT), served.server.uri, str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert problem in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_both_integer_widths_and_untraced_sizes_are_served(served: Served, dtype: type) -> None:
    batch = {name: tensor.numpy() for name, tensor in exports.batch(7, 11).items()}
    expected = exports.block()(**exports.batch(7, 11))["hidden"].detach().numpy()
    outputs = served.ask({"inputs": {"x": batch["x"].tolist(), "mask": batch["mask"].astype(dtype).tolist()}})
    np.testing.assert_allclose(np.asarray(outputs["hidden"]), expected, atol=1e-5)


def test_a_call_with_a_missing_input_is_refused_with_its_name(served: Served) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.ask({"inputs": {"x": exports.batch()["x"].tolist()}})
    assert caught.value.code == 400
    assert "mask" in caught.value.read().decode()


def test_arrays_of_another_integer_dtype_are_refused(served: Served) -> None:
    """The tracking page documents this: JSON has no dtypes, arrays do, and MLflow does not cast tensors."""
    mlflow.set_tracking_uri(served.store)
    model = mlflow.pyfunc.load_model("models:/block@champion")
    batch = {name: tensor.numpy() for name, tensor in exports.batch().items()}
    with pytest.raises(mlflow.MlflowException, match="dtype of input int32 does not match expected dtype int64"):
        model.predict({**batch, "mask": batch["mask"].astype(np.int32)})
    assert model.predict(batch)["hidden"].shape == (2, 5, 8)
