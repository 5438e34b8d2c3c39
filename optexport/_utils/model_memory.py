"""Releases memory of large models to the system.

On systems other than Linux, only Python's own memory is freed.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

# From this many bytes of weights on, avoiding a copy is worth the time.
LARGE_MODEL = 256 << 20

# From <linux/mman.h>, since Linux 5.4. Modified pages are not discarded.
_MADV_PAGEOUT = 21
# Reading smaller tensors again costs more than their memory is worth.
_MIN_PAGED_OUT_BYTES = 1 << 20


def weight_bytes(model: nn.Module) -> int:
    """Returns the size of a model's parameters in bytes."""
    return sum(parameter.nbytes for parameter in model.parameters())


def is_large(model: nn.Module) -> bool:
    """Returns True if avoiding one copy of the model's weights is worth the time."""
    return weight_bytes(model) >= LARGE_MODEL


def page_out(tensors: Iterable[torch.Tensor]) -> None:
    """Frees the memory of tensors that are mapped from a file.

    The system reads them from the file again when they are used. Works on Linux only. The ranges come from /proc,
    because psutil is slower at listing mapped addresses.
    """
    mapped_files = _mapped_files()
    if not mapped_files:
        return
    madvise = _find_c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors if madvise is not None else ():
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.nbytes >= _MIN_PAGED_OUT_BYTES:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if any(start <= first and last <= end for start, end in mapped_files):
                madvise(first, last - first, _MADV_PAGEOUT)  # if the system refuses, nothing changes


def _mapped_files() -> list[tuple[int, int]]:
    """Returns the address ranges of mapped files; empty if the system is not Linux."""
    maps = Path("/proc/self/maps")
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    named = [fields[0].split("-") for line in lines if len(fields := line.split(maxsplit=5)) == 6 and "/" in fields[5]]
    return [(int(start, 16), int(end, 16)) for start, end in named]


def collect() -> None:
    """Frees unreachable reference cycles, such as modules and graphs with their weights."""
    gc.collect()
    malloc_trim = _find_c_function("malloc_trim", ctypes.c_size_t)  # only in glibc
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _find_c_function(name: str, *types: Any) -> Any:
    """Returns a function of the C library, or None if it has no such function."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = types
    return function
