"""Whether there is room for a file. PyTorch ends the whole process where its writer of archives meets a full disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import torch
from torch.export import ExportedProgram

# In bytes: the graph, and the headers of the archive.
_BESIDE_WEIGHTS = 1 << 20


def check_room(path: Path, program: ExportedProgram) -> None:
    """Checks that the disk has room for a program and its weights; what a quota leaves of it is not seen.

    Raises:
        OSError: It has not.
    """
    tensors = [*program.state_dict.values(), *program.constants.values()]
    strided = [each for each in tensors if isinstance(each, torch.Tensor) and each.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in strided]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    if shutil.disk_usage(path.parent).free < sum(weights.values()) + _BESIDE_WEIGHTS:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
