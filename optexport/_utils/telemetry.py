"""Turns off the telemetry of libraries, except if the user's environment sets it."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

# onnxruntime has telemetry on Windows only; torch, transformers, onnx, safetensors and Hypothesis have none.
_SWITCHES = {"MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}


def disable() -> None:
    """Turns telemetry off; call it before the libraries are imported, as they read it then."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)


def import_without(name: str, telemetry: str) -> ModuleType:
    """Imports a package as if its telemetry package were not installed.

    Args:
        name: The package.
        telemetry: The package that sends its telemetry, which it can do without.
    """
    if name not in sys.modules and telemetry not in sys.modules:
        sys.modules[telemetry] = None  # type: ignore[assignment]  # Python's way to make an import fail
        try:
            return importlib.import_module(name)
        finally:
            del sys.modules[telemetry]
    return importlib.import_module(name)
