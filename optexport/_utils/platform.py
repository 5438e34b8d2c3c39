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


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes that programs can still have, in a container what it may; None where nothing tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
    left = [room for files in _CONTAINERS if (room := _left(*files)) is not None]
    return min([*left, *([] if free is None else [free])], default=None)


# How the allocators of torch, ONNX Runtime and CUDA say so, in errors that are of the same types as all their others.
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "Failed to allocate memory", "bad_alloc", "bad allocation"),
    "out of memory",
)


def is_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


# Of control groups, of version 2 and of version 1: what is allowed, what is used, and what of that can be given back.
_CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def _left(*files: str) -> int | None:
    """Bytes that a container may still have; None where it has no limit."""
    try:
        allowed, used, details = (Path(file).read_text(encoding="ascii").strip() for file in files)
    except OSError:
        return None
    if not allowed.isdecimal():  # "max"
        return None
    cached = next((int(line.split()[1]) for line in details.splitlines() if line.startswith("inactive_file ")), 0)
    return max(0, int(allowed) - int(used) + cached)
