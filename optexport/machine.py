"""The machine that measures, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Platform, processor and the number of its cores."""
    return {"platform": platform.platform(), "processor": processor(), "cpus": os.cpu_count()}


def processor() -> str:
    """The processor's name; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
