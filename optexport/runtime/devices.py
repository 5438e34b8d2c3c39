"""Where the exported files run: on the CPU, or by CUDA on a card of NVIDIA's; and whether that can be had here.

Imports neither torch nor ONNX Runtime before it needs them.
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

# In the order in which ONNX Runtime asks them for each operator. Of itself it computes float32 on a card in TF32, which
# keeps 10 of the 23 bits of the fraction.
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
    """Checks that a model, and files of these formats, can be run on a device here.

    Raises:
        DeviceError: They cannot.
    """
    check_torch(device, location)
    if "onnx" in formats:
        _check_onnx_runtime(device, location)


def check_torch(device: Device, location: str) -> None:
    """Checks that torch can run what is made for a device.

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
    """Opens an ONNX file in ONNX Runtime, on the device that is asked for and on no other.

    Operators for which a card has no kernel still run on the CPU, as do computations with sizes: so ONNX Runtime
    shares out a graph. A session that lies on the CPU as a whole is refused.

    Args:
        options: An ``onnxruntime.SessionOptions``.

    Raises:
        DeviceError: The device is not available.
        Exception: ONNX Runtime refuses the file; it raises many kinds.
    """
    import onnxruntime

    _check_onnx_runtime(device, path.name)
    if device == "cuda":
        with contextlib.redirect_stdout(sys.stderr):  # it prints what it does not find
            onnxruntime.preload_dlls()  # of the packages that torch brings
    session = onnxruntime.InferenceSession(path, options, providers=_PROVIDERS[device])
    session.disable_fallback()  # to the CPU, when a run fails
    check_session(session.get_providers(), device, path.name)
    return session


def check_session(providers: Sequence[str], device: Device, location: str) -> None:
    """Refuses a session that ONNX Runtime has put on the CPU, as it does where it cannot load its CUDA provider.

    Raises:
        DeviceError: It has.
    """
    if device == "cuda" and providers[:1] != [_CUDA]:
        raise DeviceError(
            f"ONNX Runtime could not load its {_CUDA}, and took {', '.join(providers)}",
            location=location,
            hint="See that CUDA and cuDNN are those that this onnxruntime-gpu was built for.",
        )


def set_float32_precision(wanted: Sequence[str] = ("ieee", "ieee", "ieee")) -> list[str]:
    """Sets how torch computes products, convolutions and recurrent layers of float32 on a card; returns how it did.

    Convolutions and recurrent layers are in TF32 by default.
    """
    import torch

    cudnn: Any = torch.backends.cudnn  # a module in the place of which torch puts an object
    settings = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    for setting, value in zip(settings, wanted, strict=True):
        setting.fp32_precision = value
    return before


@contextlib.contextmanager
def whole_float32(device: Device) -> Iterator[None]:
    """Within it torch computes float32 without TF32 on a card; a caller's own setting is put back at its end."""
    if device == "cpu":
        yield
        return
    before = set_float32_precision()
    try:
        yield
    finally:
        set_float32_precision(before)


def described(device: Device) -> str:
    """A device in words, with the name of the card: ``cuda (NVIDIA H200)``."""
    if device == "cpu":
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name()})"
