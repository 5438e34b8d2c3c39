"""Times of the files and of the original model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import optexport
from optexport.bundle.measurements import read_measured
from optexport.pipeline import gain


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "SECONDS", 30.0)
    monkeypatch.setattr(gain, "ROUNDS", 3)


@pytest.mark.usefixtures("timed")
def test_every_run_times_its_files_and_the_model(tmp_path: Path) -> None:
    formats = ["onnx", "torchscript", "openvino"]
    result = optexport.export(Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=formats)
    assert [record.format for record in result.gain] == formats
    assert all(record.ms > 0 and record.original_ms > 0 for record in result.gain)
    assert result.gain[0].speedup == result.gain[0].original_ms / result.gain[0].ms
    assert tuple(read_measured(tmp_path / "bundle").gain) == result.gain
    report = (tmp_path / "bundle" / "report.html").read_text(encoding="utf-8")
    assert f"{result.gain[0].speedup:.2f} times as fast as PyTorch" in report


@pytest.mark.usefixtures("timed")
def test_a_file_that_pytorch_reads_itself_is_not_timed(tmp_path: Path) -> None:
    result = optexport.export(Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=["pt2"])
    assert result.gain == ()


def test_a_slow_model_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "SECONDS", 1e-9)
    result = optexport.export(Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=["onnx"])
    assert result.gain == ()
    assert read_measured(tmp_path / "bundle").gain == []


def test_every_call_has_as_many_turns() -> None:
    calls: list[str] = []
    seconds = gain._time_in_turns([lambda: calls.append("a"), lambda: calls.append("b")], end=float("inf"))
    assert seconds is not None
    assert len(seconds) == 2
    assert all(0 < value < 1 for value in seconds)
    order = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    assert order == ["a", "b"] * gain.ROUNDS


def test_every_other_round_has_one_thread() -> None:
    threads: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gain._time_in_turns([lambda: threads.append(torch.get_num_threads())], end=float("inf"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [number for number, last in zip(threads, [None, *threads], strict=False) if number != last] == [
        2 - index % 2 for index in range(gain.ROUNDS)
    ]
