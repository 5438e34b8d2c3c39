"""Tests that a full disk is an error before PyTorch writes, which would end the process."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch

from optexport.exporters import disk_space


def exported(device: str, size: int) -> torch.export.ExportedProgram:
    layer = torch.nn.Linear(size, size, bias=False, device=device)
    return torch.export.export(layer, (torch.zeros(1, size, device=device),))


@pytest.mark.slow
def test_weights_larger_than_the_disk_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="model.pt2") as caught:
        disk_space.check_disk_space(tmp_path / "model.pt2", exported("meta", 10**8))  # 40 petabytes
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.slow
def test_weights_larger_than_the_file_size_limit_are_refused(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, before[1]))
    try:
        disk_space.check_disk_space(tmp_path / "model.pt2", exported("meta", 500))
        with pytest.raises(OSError, match="model.pt2") as caught:
            disk_space.check_disk_space(tmp_path / "model.pt2", exported("meta", 1_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.slow
def test_weights_that_fit_pass(tmp_path: Path) -> None:
    disk_space.check_disk_space(tmp_path / "model.pt2", exported("cpu", 8))
