"""Environment fields that are part of every cache key: code, versions, threads, processor, variables."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from optexport._utils.packages import versions
from optexport._utils.platform import machine, usable_cores

# Variables with which libraries choose how to compute.
_PREFIXES = (
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OPENBLAS_",
    "ORT_",
    "OV_",
    "TORCH_",
    "PYTORCH_",
    "NVIDIA_",
    "CUDA_",
    "CUBLAS_",
)


def environment() -> dict[str, Any]:
    """Returns the environment as JSON values. Results are shared by equal environments only."""
    return {
        **_process_fields(),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
    }


@functools.cache
def _process_fields() -> dict[str, Any]:
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):  # during development the version does not change
        code.update(path.read_bytes())
    instructions = torch.backends.cpu.get_cpu_capability()
    return {**versions(), **machine(), "instructions": instructions, "code": code.hexdigest()}
