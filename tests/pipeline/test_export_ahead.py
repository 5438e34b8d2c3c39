"""Tests the export that another process does ahead of its step."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optexport
from optexport._utils import forked, torch_settings
from optexport.cache import exports
from optexport.errors import ExportError
from optexport.pipeline import export_ahead
from tests._helpers.exports import batch, block

INPUTS = batch()
IS_USEFUL = forked.is_useful


@pytest.fixture(autouse=True)
def with_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "is_useful", lambda: True)
    monkeypatch.setenv("OPTEXPORT_CACHE", "")


def formats_exported_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that receives the formats that this process exports; another process has a copy of it."""
    formats: list[str] = []
    real = exports.export

    def export(graph: Any, file_format: str, *arguments: Any) -> Any:
        formats.append(file_format)
        return real(graph, file_format, *arguments)

    monkeypatch.setattr(exports, "export", export)
    return formats


def files(folder: Path) -> dict[str, bytes]:
    """Returns the files that are equal in equal runs."""
    differing = {"measurements.json", "report.html"}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in differing}


def test_both_ways_write_the_same_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = formats_exported_here(monkeypatch)
    with torch_settings.threads(2):  # the other process has one
        ahead = optexport.export(block(), INPUTS, tmp_path / "ahead" / "out")
        assert here == ["torchscript", "pt2"]
        monkeypatch.setattr(forked, "is_useful", lambda: False)
        plain = optexport.export(block(), INPUTS, tmp_path / "plain" / "out")
    assert here == ["torchscript", "pt2", "torchscript", "onnx", "pt2"]
    assert files(ahead.output) == files(plain.output)
    assert ahead.cache_hits == ()
    assert multiprocessing.active_children() == []


def test_another_run_reuses_the_file_with_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "cache"))
    with torch_settings.threads(2):
        optexport.export(block(), INPUTS, tmp_path / "all")
        onnx = optexport.export(block(), INPUTS, tmp_path / "onnx", formats=["onnx"])
    assert "export onnx" in onnx.cache_hits


def test_no_file_is_reused_whose_constants_may_depend_on_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "cache"))
    hits = []
    for index, number in enumerate([1, 2, 1]):
        with torch_settings.threads(number):
            result = optexport.export(block(), INPUTS, tmp_path / str(index), formats=["torchscript"])
        hits.append("export torchscript" in result.cache_hits)
    assert hits == [False, False, True]


def test_a_dead_process_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = formats_exported_here(monkeypatch)
    monkeypatch.setattr(export_ahead, "_write", lambda *_: exit(3))
    assert optexport.export(block(), INPUTS, tmp_path / "out").passed
    assert here == ["torchscript", "onnx", "pt2"]


class Eigenvalues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x @ x.mT)


def test_a_failed_export_gives_its_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExportError, match="onnx") as caught:
        optexport.export(Eigenvalues().eval(), {"x": INPUTS["x"]}, tmp_path / "out", formats=["pt2", "onnx"])
    assert "Traceback" not in capfd.readouterr().err
    assert caught.value.exit_code == 5
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("formats", [["onnx"], ["onnx", "openvino"]], ids=" and ".join)
def test_nothing_is_ahead_of_formats_without_other_work(
    formats: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = formats_exported_here(monkeypatch)
    optexport.export(block(), INPUTS, tmp_path / "out", formats=formats)
    assert here == formats


def test_a_worker_of_a_pool_exports_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "usable_cores", lambda: 2)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(is_useful_here) is False


def is_useful_here() -> bool:
    return IS_USEFUL()


def test_a_stuck_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_STUCK_SECONDS", 0.5)
    with forked.running(time.sleep, 60) as process:
        assert process is not None
        assert not forked.wait(process)
        assert not process.is_alive()
