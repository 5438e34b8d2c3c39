"""Tests of sessions of ONNX Runtime and their providers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest

import optexport
from optexport.errors import DeviceError
from optexport.runtime import onnx_session
from optexport.runtime.providers import PROVIDERS_KEY
from tests._helpers import exports


@pytest.mark.skipif(onnx_session.CUDA_PROVIDER in onnxruntime.get_available_providers(), reason="has the CUDA provider")
def test_session_without_the_provider_names_the_package() -> None:
    path = exports.exported().files["onnx"]
    with pytest.raises(DeviceError, match=r"no CUDAExecutionProvider\n.*'\.\[cuda\]'"):
        onnx_session.open_session(path, onnxruntime.SessionOptions(), "cuda")


def test_session_that_fell_back_to_the_cpu_is_refused() -> None:
    onnx_session.check_providers(["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda", "model.onnx")
    with pytest.raises(DeviceError, match="fell back to CPUExecutionProvider"):
        onnx_session.check_providers(["CPUExecutionProvider"], "cuda", "model.onnx")


def test_onnx_runtime_accepts_the_cuda_provider_options() -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import check_and_normalize_provider_args

    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert check_and_normalize_provider_args(
        onnx_session._with_options(onnx_session._PROVIDERS["cuda"]), None, names
    ) == (
        names,
        [{"use_tf32": "0"}, {}],
    )


def test_session_on_the_cpu_has_no_other_provider() -> None:
    session = onnx_session.open_session(exports.exported().files["onnx"], onnxruntime.SessionOptions(), "cpu")
    assert session.get_providers() == ["CPUExecutionProvider"]


def _with_metadata(folder: Path, text: str) -> Path:
    model = onnx.load(exports.exported().files["onnx"])
    model.metadata_props.add(key=PROVIDERS_KEY, value=text)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def test_session_opens_in_the_providers_of_the_file(tmp_path: Path) -> None:
    path = _with_metadata(tmp_path, '["CPUExecutionProvider"]')
    session = onnx_session.open_session(path, onnxruntime.SessionOptions(), "cpu")
    assert session.get_providers() == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["XnnpackExecutionProvider"]', "model.onnx: the installed ONNX Runtime has no XnnpackExecutionProvider"),
        ('["AzureExecutionProvider"]', "model.onnx: the AzureExecutionProvider sends inputs to a server"),
        ("not JSON", "model.onnx: the metadata of the file names no valid providers"),
        ('{"a": 1}', "model.onnx: the metadata of the file names no valid providers"),
        ("[" * 100_000, "model.onnx: the metadata of the file names no valid providers"),
        ("[1]", "model.onnx: the metadata of the file names no valid providers"),
    ],
)
def test_providers_of_a_file_that_cannot_serve_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = _with_metadata(tmp_path, text)
    with pytest.raises(DeviceError) as raised:
        onnx_session.open_session(path, onnxruntime.SessionOptions(), "cpu")
    assert str(raised.value).startswith(message)


@pytest.mark.nightly
def test_file_is_checked_in_the_provider_of_openvino(tmp_path: Path) -> None:
    """Another build of ONNX Runtime needs another process, because both builds have the same module."""
    package = tmp_path / "package"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), "onnxruntime-openvino==1.24.1"]
    subprocess.run([sys.executable, *install], check=True)
    script = f"""
import onnxruntime, optexport
from pathlib import Path
from optexport.runtime.onnx_session import open_session
from tests._helpers import exports
result = optexport.export(exports.block(), exports.batch(), {str(tmp_path / "bundle")!r}, dynamic=exports.DYNAMIC,
    formats="onnx", opset=20, passes={{"onnx": []}}, providers="OpenVINOExecutionProvider")
assert result.passed and optexport.verify(result.output).passed
session = open_session(result.files["onnx"], onnxruntime.SessionOptions(), "cpu")
assert session.get_providers() == ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
"""
    paths = os.pathsep.join([str(package), str(Path(__file__).parents[2])])
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, check=True)
    with pytest.raises(DeviceError, match="has no OpenVINOExecutionProvider"):
        optexport.verify(tmp_path / "bundle")
