"""Opens ONNX files in ONNX Runtime on a device. This module does not import torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optexport.errors import DeviceError
from optexport.runtime.devices import CUDA_PROVIDER, Device, check_onnx_runtime

# Providers in the order in which ONNX Runtime tries them for each operator. By default it computes float32 on a GPU in
# TF32, which has 10 instead of 23 fraction bits.
_PROVIDERS: dict[Device, list[Any]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
}


def open_session(path: Path, options: Any, device: Device) -> Any:
    """Opens an ONNX file in ONNX Runtime on the requested device, without fallback.

    ONNX Runtime still runs operators without a GPU kernel, and computations with sizes, on the CPU. A session that is
    entirely on the CPU raises an error if a GPU was requested.

    Args:
        options: An ``onnxruntime.SessionOptions``.

    Raises:
        DeviceError: The device is not available.
        Exception: ONNX Runtime rejects the file; it raises many types.
    """
    import onnxruntime

    check_onnx_runtime(device, path.name)
    if device == "cuda":
        with contextlib.redirect_stdout(sys.stderr):  # preload_dlls prints missing libraries
            onnxruntime.preload_dlls()  # from the packages that torch installs
    session = onnxruntime.InferenceSession(path, options, providers=_PROVIDERS[device])
    session.disable_fallback()  # no switch to the CPU after a failed run
    check_providers(session.get_providers(), device, path.name)
    return session


def check_providers(providers: Sequence[str], device: Device, location: str) -> None:
    """Checks that ONNX Runtime loaded its CUDA provider, and did not fall back to the CPU.

    Args:
        providers: Providers of the session.

    Raises:
        DeviceError: It did not load the provider.
    """
    if device == "cuda" and providers[:1] != [CUDA_PROVIDER]:
        raise DeviceError(
            f"ONNX Runtime could not load its {CUDA_PROVIDER} and fell back to {', '.join(providers)}",
            location=location,
            hint="Install the versions of CUDA and cuDNN that this onnxruntime-gpu was built for.",
        )
