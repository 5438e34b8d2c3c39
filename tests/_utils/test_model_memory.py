"""Releasing memory: pages of mapped files, and reference cycles."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport._utils import model_memory
from optexport.parity import float64_model
from optexport.pipeline import run
from tests._helpers.exports import INPUTS

SIZE = 32 << 20
CONFIG = f"""
[model]
source = "python:tests._helpers.exports:block"
{INPUTS}
[tracking]
enabled = false
"""


def _mapped(folder: Path) -> torch.Tensor:
    """Returns a tensor that is mapped from a file, with all pages read."""
    path = folder / "numbers"
    path.write_bytes(torch.arange(SIZE // 4, dtype=torch.float32).numpy().tobytes())
    tensor = torch.from_file(str(path), shared=False, size=SIZE // 4, dtype=torch.float32)
    assert float(tensor.sum()) > 0
    return tensor


def _file_backed() -> int:
    match = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert match is not None
    return 1024 * int(match[1])


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")
def test_paged_out_tensor_uses_no_memory_until_it_is_read(tmp_path: Path) -> None:
    tensor = _mapped(tmp_path)
    before = _file_backed()
    model_memory.page_out([tensor])
    assert _file_backed() < before - SIZE * 0.9
    assert torch.equal(tensor, torch.arange(SIZE // 4, dtype=torch.float32))


def test_values_written_to_mapped_pages_are_not_lost(tmp_path: Path) -> None:
    tensor = _mapped(tmp_path)
    tensor[::1000] = -1.0
    expected = tensor.clone()
    model_memory.page_out([tensor, expected])
    assert torch.equal(tensor, expected)
    assert bool((expected[::1000] == -1.0).all())


def test_reference_cycles_are_collected() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    vars(first)["second"], vars(second)["second"] = second, first
    reference = weakref.ref(first.weight)
    gc.disable()
    try:
        del first, second
        assert reference() is not None
        model_memory.collect()
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.nightly
def test_bundle_does_not_depend_on_the_large_model_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    records = []
    for place, threshold in (("small", 1 << 60), ("large", 1)):
        for module, name in ((model_memory, "LARGE_MODEL"), (float64_model, "_LARGE_PARAMETER")):
            monkeypatch.setattr(module, name, threshold)
        (tmp_path / place).mkdir()
        path = tmp_path / place / "config.toml"
        path.write_text(CONFIG, encoding="utf-8")
        manifest = run.run(path).manifest
        records.append((manifest.files, manifest.parity))
    assert records[0] == records[1]
