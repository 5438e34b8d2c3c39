"""Turns off the telemetry of libraries, except if the user's environment sets it."""

from __future__ import annotations

import os

# onnxruntime has telemetry on Windows only; torch, transformers, onnx, safetensors and Hypothesis have none.
_SWITCHES = {"MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}


def disable() -> None:
    """Turns telemetry off; call it before the libraries are imported, as they read it then."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
