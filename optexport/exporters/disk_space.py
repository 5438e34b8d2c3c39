"""Checks the disk space for a file before PyTorch or OpenVINO writes it.

PyTorch's writer of archives ends the whole process if the disk is full, and OpenVINO does not tell the reason.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import torch
from torch.export import ExportedProgram

# Bytes of the graph and the headers of the archive.
_OVERHEAD = 1 << 20


def check_disk_space(path: Path, program: ExportedProgram) -> None:
    """Checks that the disk and the file system have room for a program and its weights.

    Quotas are not taken into account.

    Raises:
        OSError: There is too little room.
    """
    tensors = [*program.state_dict.values(), *program.constants.values()]
    strided = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in strided]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    check_room(path, sum(weights.values()))


def check_room(path: Path, size: int) -> None:
    """Checks that the disk and the file system have room for a file of some bytes, and its graph.

    Raises:
        OSError: There is too little room.
    """
    needed = size + _OVERHEAD
    if needed > _max_file_size():
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _max_file_size() -> float:
    """Returns the limit on the size of a file in bytes."""
    if sys.platform == "win32":
        return float("inf")
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return float("inf") if limit == resource.RLIM_INFINITY else limit
