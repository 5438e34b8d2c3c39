"""Selects and checks the device for exported files: the CPU, or an NVIDIA GPU with CUDA.

This module imports torch and ONNX Runtime only in functions that need them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from optexport._utils.extras import how_to_install
from optexport.errors import DeviceError

Device = Literal["cpu", "cuda"]

# Providers in the order in which ONNX Runtime tries them for each operator. By default it computes float32 on a GPU in
# TF32, which has 10 instead of 23 fraction bits.
_PROVIDERS: dict[Device, list[Any]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
}
_CUDA = "CUDAExecutionProvider"
_MEND = 'Run it where there is a card, with its driver; or export for the CPU: leave out device = "cuda".'
_MEND_ONNX = (
    f"{how_to_install('cuda')}, and then, since both packages write to one folder: pip uninstall onnxruntime; "
    "pip install --force-reinstall --no-deps onnxruntime-gpu"
)


def check(device: Device, formats: Collection[str], location: str) -> None:
    """Checks that a model, and files of these formats, can run on a device here.

    Raises:
        DeviceError: They cannot.
    """
    check_torch(device, location)
    if "onnx" in formats:
        _check_onnx_runtime(device, location)


def check_torch(device: Device, location: str) -> None:
    """Checks that torch can run on a device here.

    Raises:
        DeviceError: It cannot.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        built = "is built for the CPU alone" if torch.version.cuda is None else f"has CUDA {torch.version.cuda}"
        raise DeviceError(f"torch {torch.__version__} sees no CUDA device; it {built}", location=location, hint=_MEND)


def _check_onnx_runtime(device: Device, location: str) -> None:
    if device == "cpu":
        return
    import onnxruntime

    if _CUDA not in onnxruntime.get_available_providers():
        raise DeviceError(f"this ONNX Runtime has no {_CUDA}", location=location, hint=_MEND_ONNX)


def onnx_session(path: Path, options: Any, device: Device) -> Any:
    """Opens an ONNX file in ONNX Runtime on the requested device, without fallback.

    ONNX Runtime still runs operators without a GPU kernel, and computations with sizes, on the CPU. A session that is
    entirely on the CPU raises an error if a GPU was requested.

    Args:
        options: An ``onnxruntime.SessionOptions``.

    Raises:
        DeviceError: The device is not available.
        SourceError: The file is not ONNX, or its functions cannot be inlined.
        Exception: ONNX Runtime rejects the file; it raises many types.
    """
    import onnxruntime

    _check_onnx_runtime(device, path.name)
    if device == "cuda":
        with contextlib.redirect_stdout(sys.stderr):  # preload_dlls prints missing libraries
            onnxruntime.preload_dlls()  # from the packages that torch installs
    session = onnxruntime.InferenceSession(path, options, providers=_PROVIDERS[device])
    session.disable_fallback()  # no switch to the CPU after a failed run
    check_session(session.get_providers(), device, path.name)
    return session


def check_session(providers: Sequence[str], device: Device, location: str) -> None:
    """Checks that ONNX Runtime loaded its CUDA provider, and did not fall back to the CPU.

    Args:
        providers: Providers of the session.

    Raises:
        DeviceError: It did not load the provider.
    """
    if device == "cuda" and providers[:1] != [_CUDA]:
        raise DeviceError(
            f"ONNX Runtime could not load its {_CUDA}, and took {', '.join(providers)}",
            location=location,
            hint="See that CUDA and cuDNN are those that this onnxruntime-gpu was built for.",
        )


def set_float32_precision(wanted: Sequence[str] = ("ieee", "ieee", "ieee")) -> list[str]:
    """Sets torch's precision for float32 matrix products, convolutions and recurrent layers.

    It applies to GPUs. torch's default is TF32 for convolutions and recurrent layers.

    Args:
        wanted: Values of ``fp32_precision`` for these three, in this order.

    Returns:
        The previous values, in the same order.
    """
    import torch

    cudnn: Any = torch.backends.cudnn  # torch replaces this module by an object
    settings = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    for setting, value in zip(settings, wanted, strict=True):
        setting.fp32_precision = value
    return before


@contextlib.contextmanager
def whole_float32(device: Device) -> Iterator[None]:
    """Turns off TF32 on a GPU in a ``with`` block, and then restores the previous setting."""
    if device == "cpu":
        yield
        return
    before = set_float32_precision()
    try:
        yield
    finally:
        set_float32_precision(before)


def described(device: Device) -> str:
    """Returns a description of a device, with the name of the GPU: ``cuda (NVIDIA H200)``."""
    if device == "cpu":
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name()})"
