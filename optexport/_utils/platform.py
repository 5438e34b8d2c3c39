"""Properties of this machine: processor, cores and memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

# Files of control groups about memory, version 2 and version 1: limit, usage, and details of the usage.
_MEMORY_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)

# Those about processor time: the limit and the period, in one file or in two.
_TIME_LIMITS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)

# Flags of processors, as Linux names them.
AVX2 = "avx2"
AVX512 = "avx512f"
AMX = "amx_tile"

# Messages of the allocators of torch, ONNX Runtime and CUDA, whose errors have no special type.
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "Failed to allocate memory", "bad_alloc", "bad allocation"),
    "out of memory",
)


def machine() -> dict[str, Any]:
    """Returns the platform, the processor and the number of cores."""
    return {"platform": platform.platform(), "processor": processor(), "cpus": os.cpu_count()}


def processor() -> str:
    """Returns the processor's name, or an empty string if it is unknown."""
    try:
        # On Linux, neither platform nor psutil reports the model.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def processor_flags() -> frozenset[str]:
    """Returns the processor's flags as Linux names them, such as ``avx512f``; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def saturates_int8() -> bool:
    """Returns True if this processor may saturate sums of products of 8-bit numbers, as x86 without VNNI does."""
    has_vnni = processor_flags() & {"avx512_vnni", "avx_vnni", "amx_int8"}
    return platform.machine().lower() in {"x86_64", "amd64"} and not has_vnni


def usable_cores() -> int:
    """Returns the number of cores that this process may use, within a container's limit; at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    limits = [limit for files in _TIME_LIMITS if (limit := _container_cores(*files)) is not None]
    return max(1, min([cores, *limits]))


def free_memory() -> int:
    """Returns the bytes of memory that programs can still use, within a container's limit."""
    limits = [room for files in _MEMORY_LIMITS if (room := _container_memory(*files)) is not None]
    return min([*limits, int(psutil.virtual_memory().available)])


def _container_cores(*files: str) -> int | None:
    """Returns the number of whole cores that a container may use; None if it has no limit."""
    try:
        texts = [Path(file).read_text(encoding="ascii") for file in files]
    except OSError:
        return None
    quota, period = " ".join(texts).split()
    return int(quota) // int(period) if quota.isdecimal() else None  # "max" or -1


def _container_memory(*files: str) -> int | None:
    """Returns the bytes that a container may still use; None if it has no limit."""
    try:
        limit, used, details = (Path(file).read_text(encoding="ascii").strip() for file in files)
    except OSError:
        return None
    if not limit.isdecimal():  # "max"
        return None
    # The usage includes cached pages of files, but the system can free them.
    cached = next((int(line.split()[1]) for line in details.splitlines() if line.startswith("inactive_file ")), 0)
    return max(0, int(limit) - int(used) + cached)


def is_of_memory(error: BaseException) -> bool:
    """Returns True if an error means that no memory is left."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)
