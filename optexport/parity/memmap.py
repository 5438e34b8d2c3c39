"""Keeps large results on disk, so that those of thousands of rows of data need not fit in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import torch

from optexport._utils.tensors import bytes_of

# Tensors of fewer bytes stay in memory: pages of a file would gain nothing.
_LEAST_BYTES = 1 << 20


def spilled(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, the large ones in files without a name, which go when nobody holds the tensors any longer.

    The system keeps as much of them in memory as there is room for.

    Raises:
        OSError: There is no room in the folder for temporary files (``TMPDIR``).
    """
    return {name: _mapped(t) if t.nbytes >= _LEAST_BYTES else t for name, t in outputs.items()}


def _mapped(tensor: torch.Tensor) -> torch.Tensor:
    with tempfile.NamedTemporaryFile(prefix="optexport-") as file:
        file.write(bytes_of(tensor).numpy().data)
        file.flush()
        target = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    return target.view(tensor.dtype).view(tensor.shape)
