"""A real Triton Inference Server serves the repositories of bundles with the original's results.

The server, its Python backend and its batching are NVIDIA's; `tests.serving.backend` runs the files of models.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.serving.models import served
from tests.serving.test_clients import distances
from tests.serving.triton_server import Triton, serving

pytestmark = pytest.mark.system

CLIENT = Path(__file__).parents[2] / "examples" / "serving" / "triton_client.py"
NAMES = ("rows", "block", "pairs", "mixed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with serving(
        [served(name).output / "model_repository" for name in NAMES], tmp_path_factory.mktemp("triton")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client() -> Any:
    spec = importlib.util.spec_from_file_location("triton_client", CLIENT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_example_client_gets_the_originals_results(name: str, server: Triton) -> None:
    result = served(name)
    done = subprocess.run(
        [sys.executable, str(CLIENT), server.uri, str(result.output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr}\n{server.log.read_text()}"
    models = [path.parents[1].name for file_format, path in result.files.items() if file_format != "pt2"]
    cases = [f"{model}: {case}" for model in models for case in result.manifest.reference_cases]
    distances(done.stdout, cases, result)


def test_server_uses_the_written_configuration(server: Triton) -> None:
    config = server.get("models/rows_torchscript/config")
    assert config["max_batch_size"] == 16
    assert "dynamic_batching" in config
    assert [io["name"] for io in config["input"]] == ["x", "flag", "ids", "states_0", "states_1"]
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert "dynamic_batching" not in server.get("models/mixed_onnx/config")


@pytest.mark.parametrize("model", ["rows_onnx", "rows_torchscript"])
def test_simultaneous_requests_are_batched_and_answered_apart(model: str, server: Triton, client: Any) -> None:
    result = served("rows")
    stored = load_file(result.output / "reference.safetensors")
    inputs = [stored[f"0.inputs.{spec.name}"] for spec in result.manifest.inputs]
    expected = [stored[f"0.outputs.{spec.name}"] for spec in result.manifest.outputs]
    rows = [row % 4 for row in range(24)]
    before = server.get(f"models/{model}/stats")["model_stats"][0]
    for _ in range(50):  # fast models seldom let requests meet
        with ThreadPoolExecutor(len(rows)) as pool:
            answers = list(
                pool.map(
                    lambda row: client.predict(server.uri, model, [array[row : row + 1] for array in inputs]), rows
                )
            )
        for row, answer in zip(rows, answers, strict=True):
            for want, got in zip(expected, answer.values(), strict=True):
                np.testing.assert_allclose(got.reshape(want[row].shape), want[row], rtol=1e-5, atol=1e-5)
        after = server.get(f"models/{model}/stats")["model_stats"][0]
        if after["execution_count"] - before["execution_count"] < after["inference_count"] - before["inference_count"]:
            return
    raise AssertionError("the server put no requests together")


def test_batch_larger_than_the_verified_one_is_refused(server: Triton, client: Any) -> None:
    inputs = [np.zeros((17, 5, 4), np.float32), np.zeros(17, bool), np.zeros((17, 5), np.int64)]
    with pytest.raises(OSError, match="400"):
        client.predict(server.uri, "rows_onnx", [*inputs, *(np.zeros((17, 2), np.float16) for _ in range(2))])
