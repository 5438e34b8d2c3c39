"""Selects and checks the device for exported files: the CPU, or an NVIDIA GPU with CUDA.

This module imports torch and ONNX Runtime only in functions that need them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from optexport._utils.extras import how_to_install
from optexport._utils.platform import saturates_int8
from optexport.errors import DeviceError

Device = Literal["cpu", "cuda"]

CUDA_PROVIDER = "CUDAExecutionProvider"
# Entry of an ONNX file's metadata with the bits of its weights, if these need VNNI.
WEIGHT_BITS_KEY = "optexport.weight_bits"
_HINT = 'Run on a machine with an NVIDIA GPU and its driver, or export for the CPU: remove device = "cuda".'
_HINT_ONNX = (
    f"{how_to_install('cuda')}. Then, because both packages write to one folder: pip uninstall onnxruntime; "
    "pip install --force-reinstall --no-deps onnxruntime-gpu"
)


def check_torch(device: Device, location: str) -> None:
    """Checks that torch can run on a device here.

    Raises:
        DeviceError: It cannot.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        build = "built for the CPU only" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise DeviceError(f"torch {torch.__version__} ({build}) finds no CUDA device", location=location, hint=_HINT)


def check_onnx_runtime(device: Device, location: str) -> None:
    """Checks that this build of ONNX Runtime supports a device.

    Raises:
        DeviceError: It does not.
    """
    if device == "cpu":
        return
    import onnxruntime

    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise DeviceError(f"the installed ONNX Runtime has no {CUDA_PROVIDER}", location=location, hint=_HINT_ONNX)


def check_weight_bits(weight_bits: int, location: str) -> None:
    """Checks that this processor gives the right sums of products with weights of 8 bits.

    Raises:
        DeviceError: It does not, or does not say so.
    """
    if weight_bits == 8 and saturates_int8():
        raise DeviceError(
            "weights in 8 bits need a processor with VNNI, and this one has none, or its flags are unknown",
            location=location,
            hint="Export with weight_bits = 7, or run on such a processor.",
        )


@contextlib.contextmanager
def needed_instructions(location: str) -> Iterator[None]:
    """Translates the errors of oneDNN about bfloat16 on a processor without the instructions for it.

    Raises:
        DeviceError: The processor has none, as x86 without AVX-512.
    """
    import torch

    try:
        yield
    except RuntimeError as error:
        messages = ("could not create a primitive", "bf16 path needs the cpu support")
        if torch.ops.mkldnn._is_mkldnn_bf16_supported() or not any(message in str(error) for message in messages):
            raise
        raise DeviceError(
            "oneDNN cannot compute layers in bfloat16 on this processor",
            location=location,
            hint="Run on a processor with AVX-512, or export without the pass onednn-linear.",
        ) from error


def set_float32_precision(precisions: Sequence[str] = ("ieee", "ieee", "ieee")) -> list[str]:
    """Sets torch's precision for float32 matrix products, convolutions and recurrent layers.

    It applies to GPUs. torch's default is TF32 for convolutions and recurrent layers.

    Args:
        precisions: Values of ``fp32_precision`` for these three, in this order.

    Returns:
        The previous values, in the same order.
    """
    import torch

    cudnn: Any = torch.backends.cudnn  # torch replaces this module by an object
    settings = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    for setting, value in zip(settings, precisions, strict=True):
        setting.fp32_precision = value
    return before


@contextlib.contextmanager
def full_float32(device: Device) -> Iterator[None]:
    """Turns off TF32 on a GPU in a ``with`` block, and then restores the previous setting."""
    if device == "cpu":
        yield
        return
    before = set_float32_precision()
    try:
        yield
    finally:
        set_float32_precision(before)


def describe(device: Device) -> str:
    """Returns a description of a device, with the name of the GPU: ``cuda (NVIDIA H200)``."""
    if device == "cpu":
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name()})"
