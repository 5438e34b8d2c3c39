"""Opens ONNX files in ONNX Runtime on a device. This module does not import torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optexport.errors import DeviceError
from optexport.runtime.devices import CUDA_PROVIDER, WEIGHT_BITS_KEY, Device, check_onnx_runtime, check_weight_bits
from optexport.runtime.providers import PROVIDERS_KEY, check_available

# TensorProto.BFLOAT16 in onnx.proto; onnx itself need not be installed to run a file.
_ONNX_BFLOAT16 = 16

# Providers in the order in which ONNX Runtime tries them for each operator. By default it computes float32 on a GPU in
# TF32, which has 10 instead of 23 fraction bits.
_CPU = "CPUExecutionProvider"
_FULL_FLOAT32 = {CUDA_PROVIDER: {"use_tf32": "0"}}
_PROVIDERS: dict[Device, list[str]] = {"cpu": [_CPU], "cuda": [CUDA_PROVIDER, _CPU]}


def open_session(path: Path, options: Any, device: Device) -> Any:
    """Opens an ONNX file in ONNX Runtime on the requested device, without fallback.

    If the metadata of the file names providers, they come before the CPU. ONNX Runtime still runs operators without a
    kernel there, and computations with sizes, on the CPU. A session that is entirely on the CPU raises an error if a
    GPU was requested.

    Args:
        options: An ``onnxruntime.SessionOptions``.

    Raises:
        DeviceError: The device, a provider or a needed feature of the processor is not available.
        Exception: ONNX Runtime rejects the file; it raises many types.
    """
    import onnxruntime

    check_onnx_runtime(device, path.name)
    if device == "cuda":
        with contextlib.redirect_stdout(sys.stderr):  # preload_dlls prints missing libraries
            onnxruntime.preload_dlls()  # from the packages that torch installs
    session = onnxruntime.InferenceSession(path, options, providers=_with_options(_PROVIDERS[device]))
    check_providers(session.get_providers(), device, path.name)
    if names := _read_providers(session, path.name):
        check_available(names, path.name)
        session.set_providers(_with_options([*names, _CPU]))
        if missing := [name for name in names if name not in session.get_providers()]:
            raise DeviceError(
                f"ONNX Runtime could not load its {' and '.join(missing)}",
                location=path.name,
                hint="Install what this provider needs, or remove it from export.onnx.providers.",
            )
    if session.get_modelmeta().custom_metadata_map.get(WEIGHT_BITS_KEY) == "8":
        check_weight_bits(8, path.name)
    session.disable_fallback()  # no switch to the CPU after a failed run
    return session


def _with_options(names: Sequence[str]) -> list[Any]:
    """Adds the options for full precision to providers that need them."""
    return [(name, _FULL_FLOAT32[name]) if name in _FULL_FLOAT32 else name for name in dict.fromkeys(names)]


def _read_providers(session: Any, location: str) -> list[str]:
    """Reads the providers that a file, perhaps a stranger's, was exported for."""
    text = session.get_modelmeta().custom_metadata_map.get(PROVIDERS_KEY, "[]")
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DeviceError(f"the metadata of the file names no valid providers ({PROVIDERS_KEY})", location=location)
    return names


def run_session(session: Any, outputs: Sequence[str], inputs: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """Runs a session. Inputs and outputs in bfloat16, which numpy lacks, are float32 arrays here."""
    bfloat16_names = {
        node.name for node in (*session.get_inputs(), *session.get_outputs()) if node.type == "tensor(bfloat16)"
    }
    if not bfloat16_names:
        return list(session.run(list(outputs), inputs))
    from onnxruntime import OrtValue

    def to_value(name: str, array: npt.NDArray[Any]) -> Any:
        if name not in bfloat16_names:
            return OrtValue.ortvalue_from_numpy(array)
        return OrtValue.ortvalue_from_numpy_with_onnx_type(_to_bfloat16(array), _ONNX_BFLOAT16)

    values = {name: to_value(name, array) for name, array in inputs.items()}
    results = session.run_with_ort_values(list(outputs), values)
    return [
        _from_bfloat16(value) if name in bfloat16_names else value.numpy()
        for name, value in zip(outputs, results, strict=True)
    ]


def _to_bfloat16(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of float32 numbers in bfloat16, rounded to the nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded.astype(np.uint16)).reshape(array.shape)


def _from_bfloat16(value: Any) -> npt.NDArray[Any]:
    """Copies a result in bfloat16 to a float32 array; ONNX Runtime offers only its address."""
    shape, size = value.shape(), math.prod(value.shape())
    bits = (ctypes.c_uint16 * size).from_address(value._ortvalue.data_ptr()) if size else []
    return (np.array(bits, np.uint32) << 16).view(np.float32).reshape(shape)


def bind_session(session: Any, batch: Mapping[str, Any], device: Device) -> Callable[[], object]:
    """Returns a call that runs a session with inputs and outputs on a device.

    The call does not copy between device and host, so that its time compares with a call of torch.
    """
    import onnxruntime

    binding = session.io_binding()
    for name, array in batch.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, device)

    def run() -> Any:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()

    return run


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
