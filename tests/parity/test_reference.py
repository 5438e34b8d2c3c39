"""Tests that large results of user data are stored in files."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch

from optexport.parity.reference import map_to_files


def test_large_results_are_stored_in_unnamed_files() -> None:
    large, small = torch.randn(1 << 18).reshape(512, -1).t(), torch.randn(3)
    mapped = map_to_files({"large": large, "small": small, "half": large.bfloat16().repeat(2, 1)})
    assert torch.equal(mapped["large"], large)
    assert torch.equal(mapped["half"], large.bfloat16().repeat(2, 1))
    assert mapped["small"] is small
    target = mapped["large"].untyped_storage().filename
    assert target is not None
    assert not Path(target).exists()


def test_results_too_large_for_a_file_raise_an_error() -> None:
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            map_to_files({"y": torch.ones(1 << 19)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        signal.signal(signal.SIGXFSZ, before)
