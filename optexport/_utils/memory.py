"""Gives memory back to the system that a large model's run holds, and does not need for the time being."""

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

# Weights of fewer bytes are held as often as that saves time.
LARGE_MODEL = 256 << 20

# From <linux/mman.h>, since Linux 5.4; what was written to is kept.
_MADV_PAGEOUT = 21
# Where less would be had back, reading it again costs more.
_LEAST_BYTES = 1 << 20


def weight_bytes(model: nn.Module) -> int:
    """How many bytes a model's parameters take."""
    return sum(parameter.nbytes for parameter in model.parameters())


def is_large(model: nn.Module) -> bool:
    """Whether it is worth some time to hold a model's weights once less."""
    return weight_bytes(model) >= LARGE_MODEL


def page_out(tensors: Iterable[torch.Tensor]) -> None:
    """Gives back the memory of tensors that are mapped from a file; what is used again is read from there.

    Does nothing on other systems than Linux, nor to tensors that lie in memory of the process's own.
    """
    advise, files = _of_libc("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), _mapped_files()
    for tensor in tensors if advise is not None else ():
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.nbytes >= _LEAST_BYTES:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if any(start <= first and last <= end for start, end in files):
                advise(first, last - first, _MADV_PAGEOUT)  # an advice: a system that refuses it changes nothing


def _mapped_files() -> list[tuple[int, int]]:
    """The addresses at which files are mapped, where the system tells."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.is_file() else []
    named = [fields[0].split("-") for line in lines if len(fields := line.split(maxsplit=5)) == 6 and "/" in fields[5]]
    return [(int(start, 16), int(end, 16)) for start, end in named]


def collect() -> None:
    """Frees what nobody refers to: modules and graphs refer to each other, and go with their weights only then."""
    gc.collect()
    trim = _of_libc("malloc_trim", ctypes.c_size_t)  # of glibc alone
    if trim is not None:
        trim(0)


@functools.cache
def _of_libc(name: str, *types: Any) -> Any:
    """A function of the C library; None where there is none of that name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = types
    return function
