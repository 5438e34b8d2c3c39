"""Keeps libraries from calling home. A user's own setting, in the environment, stays."""

from __future__ import annotations

import os

# onnxruntime reports on Windows only; torch, transformers, onnx, safetensors and Hypothesis report nothing themselves.
_SWITCHES = {"MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1"}


def off() -> None:
    """Turns the libraries' telemetry off. They read this when they are imported, so it is called before."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
