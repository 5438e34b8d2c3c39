"""A full disk is told before PyTorch's writer meets it, which would end the process."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from optexport.formats import room


def exported(device: str, size: int) -> torch.export.ExportedProgram:
    layer = torch.nn.Linear(size, size, bias=False, device=device)
    return torch.export.export(layer, (torch.zeros(1, size, device=device),))


def test_weights_that_no_disk_holds_are_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="model.pt2") as caught:
        room.check_room(tmp_path / "model.pt2", exported("meta", 10**8))  # 40 petabytes
    assert caught.value.errno == errno.ENOSPC


def test_what_fits_passes(tmp_path: Path) -> None:
    room.check_room(tmp_path / "model.pt2", exported("cpu", 8))
