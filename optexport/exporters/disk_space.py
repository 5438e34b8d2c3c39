"""Whether there is room for a file. PyTorch ends the whole process where its writer of archives finds none."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import torch
from torch.export import ExportedProgram

# In bytes: the graph, and the headers of the archive.
_BESIDE_WEIGHTS = 1 << 20


def check_room(path: Path, program: ExportedProgram) -> None:
    """Checks that the disk has room for a program and its weights, and that a file may be so large.

    What a quota leaves of the disk is not seen.

    Raises:
        OSError: It has not.
    """
    tensors = [*program.state_dict.values(), *program.constants.values()]
    strided = [each for each in tensors if isinstance(each, torch.Tensor) and each.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in strided]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    needed = sum(weights.values()) + _BESIDE_WEIGHTS
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if resource.RLIM_INFINITY != limit < needed:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
