"""Tests of errors of ``optexport bench``."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from optexport.bench import turns as racing
from optexport.bench.artifact import Artifact
from optexport.bench.measure import measure
from optexport.bench.turns import Settings, race
from optexport.errors import BenchError
from tests._helpers import exports
from tests._helpers.cli import message
from tests.bench.files import WIDTH, chain
from tests.bench.running import BRIEF, call, workload


def test_changed_bundle_is_refused_before_loading(tmp_path: Path) -> None:
    bundle = shutil.copytree(exports.exported().output, tmp_path / "bundle")
    content = bytearray((bundle / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / "model.onnx").write_bytes(content)
    assert "model.onnx: the file was changed" in message(call(bundle), 4)
    assert "model.onnx: the file was changed" in message(call(bundle / "model.pt2"), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("batch=0", "does not have the form"),
        ("batch", "does not have the form"),
        ("batch=2,batch=3", "does not have the form"),
        (f"batch={'9' * 5000}", "does not have the form"),
        ("bach=2", 'Did you mean "batch"?'),
        ("sequence=65", "sequence is out of range (expected 2 to 64, found 65)"),
    ],
)
def test_invalid_shapes_are_refused(shape: str, words: str) -> None:
    result = call(exports.exported().output, "--shape", shape)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.slow
def test_bundles_with_other_inputs_are_not_compared(tmp_path: Path) -> None:
    bundle = exports.quick(torch.nn.Linear(4, 4).eval(), {"input": torch.randn(2, 4)}, tmp_path / "b", formats=["pt2"])
    error = message(call(exports.exported().output, "--against", bundle.output, *BRIEF), 2)
    assert "pt2: inputs input are missing (found mask, x)" in error


def test_paths_without_exported_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert "the path is neither a bundle nor an exported file" in message(call(tmp_path / "a.txt"), 2)
    assert "the folder is not a bundle (manifest.json is missing)" in message(call(tmp_path), 2)
    (tmp_path / "a.onnx").write_text("x")
    assert "the file is not a valid ONNX file" in message(call(tmp_path / "a.onnx"), 5)
    assert call(tmp_path / "nowhere.onnx").exit_code == 2
    assert "no file has the format pt2" in message(call(chain(tmp_path / "b.onnx", 1), "--format", "pt2"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_invalid_seconds_are_refused(seconds: str) -> None:
    assert call(exports.exported().output, "--seconds", seconds).exit_code == 2


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    assert "the path is neither a bundle nor an exported file" in message(call(pipe), 2)
    path = chain(tmp_path / "a.onnx", 1)
    assert "the file does not exist" in message(call(path, "--inputs", pipe), 2)
    assert "the file exists and is not a benchmark result" in message(call(path, "--output", pipe), 2)


@pytest.mark.slow
def test_error_shows_the_last_line_of_torchscript(tmp_path: Path) -> None:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    torch.jit.save(scripted, tmp_path / "a.pt")
    save_file({"input": np.ones((2, 5), "float32")}, tmp_path / "in.safetensors")
    error = message(call(tmp_path / "a.pt", "--inputs", tmp_path / "in.safetensors", *BRIEF), 5)
    assert "cannot run the file: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)" in error


@pytest.mark.slow
def test_error_names_its_shape(tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    good = workload(tmp_path)
    save_file({"x": np.ones((4, 8, WIDTH - 1), "float32")}, tmp_path / "bad.safetensors")
    bad = replace(good, sizes={"batch": 9}, file=tmp_path / "bad.safetensors")
    with pytest.raises(BenchError, match="one: at batch=9: cannot run the file: "):
        measure([Artifact("one", path, "onnx", 1)], [good, bad], [], Settings(rounds=2, seconds=0.001))


@pytest.mark.slow
def test_error_of_a_runtime_names_the_file(tmp_path: Path) -> None:
    inputs = tmp_path / "in.safetensors"
    save_file({"z": np.ones((2, 2), "float32")}, inputs)
    path = chain(tmp_path / "a.onnx", 1)
    error = message(call(path, "--inputs", inputs, *BRIEF), 5)
    assert error.startswith(f"{path}: cannot run the file")
    assert "inputs x are missing (found z)" in error
    read = json.loads(call(path, "--inputs", inputs, *BRIEF, "--json").stdout)
    assert read == {"passed": False, "exit_code": 5, "error": error.rstrip("\n"), "mlflow_run_id": None, "parity": None}


def test_error_of_a_killed_process_names_file_and_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    monkeypatch.setattr(racing, "_WORKER", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(BenchError) as caught:
        race([Artifact("mine", path, "onnx", 1)], [workload(tmp_path)], Settings(rounds=2))
    assert (caught.value.location, caught.value.message) == ("mine", "the process that ran the file ended by SIGKILL")
    assert caught.value.exit_code == 5
    monkeypatch.setattr(racing, "_WORKER", "import sys; sys.exit('no room')")
    with pytest.raises(BenchError, match="the process that ran the file ended with exit code 1: no room"):
        race([Artifact("mine", path, "onnx", 1)], [workload(tmp_path)], Settings(rounds=2))


def test_equal_shapes_are_refused(tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 2)
    error = message(call(path, "--shape", "batch=1,length=2", "--shape", "length=2,batch=1", *BRIEF), 2)
    assert "--shape[1]: the same sizes occur twice" in error


@pytest.mark.slow
def test_inputs_out_of_range_are_refused(tmp_path: Path) -> None:
    tensors = {"x": np.ones((2, 65, 8), "float32"), "mask": np.ones((2, 65), "int64")}
    save_file(tensors, tmp_path / "in.safetensors")
    error = message(call(exports.exported().output, "--inputs", tmp_path / "in.safetensors", *BRIEF), 2)
    assert "sequence is out of range (expected 2 to 64, found 65)" in error
