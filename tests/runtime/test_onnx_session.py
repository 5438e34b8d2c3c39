"""Tests of sessions of ONNX Runtime and their providers."""

from __future__ import annotations

import onnxruntime
import pytest

from optexport.errors import DeviceError
from optexport.runtime import onnx_session
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
    assert check_and_normalize_provider_args(onnx_session._PROVIDERS["cuda"], None, names) == (
        names,
        [{"use_tf32": "0"}, {}],
    )


def test_session_on_the_cpu_has_no_other_provider() -> None:
    session = onnx_session.open_session(exports.exported().files["onnx"], onnxruntime.SessionOptions(), "cpu")
    assert session.get_providers() == ["CPUExecutionProvider"]
