"""Memory-mapped results, so that large data sets need not fit into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import torch

from optexport._utils.tensors import bytes_of

# Smaller tensors stay in memory, because a mapped file saves nothing for a few pages.
_LEAST_BYTES = 1 << 20


def spilled(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves large tensors into unnamed temporary files, mapped into memory.

    The operating system deletes a file once its last tensor is freed, and caches the files in free memory.

    Raises:
        OSError: The folder for temporary files (``TMPDIR``) is full.
    """
    return {name: _mapped(t) if t.nbytes >= _LEAST_BYTES else t for name, t in outputs.items()}


def _mapped(tensor: torch.Tensor) -> torch.Tensor:
    with tempfile.NamedTemporaryFile(prefix="optexport-") as file:
        file.write(bytes_of(tensor).numpy().data)
        file.flush()
        target = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    return target.view(tensor.dtype).view(tensor.shape)
