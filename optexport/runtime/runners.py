"""Runs exported files in their own runtimes, without transformers or the original model."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from optexport._utils.module_state import copy_shared_outputs
from optexport._utils.torch_settings import as_in_a_new_process
from optexport.errors import ExportError, OptexportError, first_line
from optexport.runtime import devices
from optexport.runtime.devices import Device
from optexport.runtime.onnx_session import open_session, run_session
from optexport.runtime.untrusted import archives
from optexport.signature.signature import as_arguments

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at import; a user's setting has precedence
import onnxruntime

Run = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


def open_onnx(
    path: Path,
    outputs: Sequence[str],
    device: Device = "cpu",
    *,
    optimized: bool,
    level: str = "ORT_ENABLE_ALL",
    spinning: bool = False,
) -> Run:
    """Opens an ONNX file in ONNX Runtime.

    Args:
        outputs: Names of the file's outputs.
        optimized: True for graph optimizations as in production, False for none.
        level: Level of the optimizations.
        spinning: Whether idle threads spin, the default of ONNX Runtime. That is faster, unless another process needs
            the cores: then it takes several times as long.

    Raises:
        ExportError: The runtime rejects the file.
        DeviceError: The runtime cannot run it on that device here.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised anyway
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, level if optimized else "ORT_DISABLE_ALL"
    )
    try:
        session = open_session(path, options, device)
    except OptexportError:
        raise
    except Exception as error:  # the runtime's exceptions share no base class
        raise ExportError(
            f"ONNX Runtime rejects the file: {first_line(error)}",
            location=path.name,
            hint='Try another export.opset or model.dtype, or leave "onnx" out of export.formats.',
        ) from error
    input_names = [node.name for node in session.get_inputs()]
    bfloat16_names = {node.name for node in session.get_outputs() if node.type == "tensor(bfloat16)"}

    @as_in_a_new_process()
    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = run_session(session, outputs, {name: _as_array(inputs[name]) for name in input_names})
        tensors = {name: torch.from_numpy(np.asarray(result)) for name, result in zip(outputs, results, strict=True)}
        return {name: tensor.bfloat16() if name in bfloat16_names else tensor for name, tensor in tensors.items()}

    return run


def _as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


@as_in_a_new_process()
def open_torchscript(path: Path, outputs: Sequence[str], device: Device = "cpu") -> Run:
    """Opens a TorchScript file, after checking that it only computes.

    Raises:
        SourceError: The file does more than compute, or does not load.
        DeviceError: The device is not available.
    """
    devices.check_torch(device, path.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return _runner(archives.load_torchscript(path), outputs, device, path.name)


@as_in_a_new_process()
def open_pt2(path: Path, outputs: Sequence[str], device: Device = "cpu") -> Run:
    """Opens a ``.pt2`` file, after checking that it contains no code.

    Raises:
        SourceError: The file contains something that could run code, or does not load.
        DeviceError: The device is not available.
    """
    devices.check_torch(device, path.name)
    return _runner(archives.pt2_module(path), outputs, device, path.name)


def _runner(module: nn.Module, outputs: Sequence[str], device: Device, name: str) -> Run:
    @as_in_a_new_process()
    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copied = copy.deepcopy(as_arguments(inputs))  # a model may change its inputs in place
        with torch.no_grad(), devices.full_float32(device), devices.needed_instructions(name):
            results = copy_shared_outputs(
                module, module(**{name: tensor.to(device) for name, tensor in copied.items()})
            )
        return {name: result.cpu() for name, result in zip(outputs, results, strict=True)}

    return run
