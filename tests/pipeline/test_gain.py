"""Times of the files and of the original model."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import optexport
from optexport.bundle.measurements import GainRecord, read_measured
from optexport.bundle.outcomes import Outcome, Trial
from optexport.pipeline import gain
from tests._helpers import exports
from tests._helpers.graphs import Program


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
    threads = torch.get_num_threads()
    result = optexport.export(
        Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=formats, dynamic={"input": {0: "batch"}}
    )
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, True)
    assert [record.format for record in result.gain] == formats
    assert all(record.ms > 0 and record.original_ms > 0 for record in result.gain)
    assert all(record.low <= record.speedup <= record.high for record in result.gain)
    assert {(record.sizes, record.threads) for record in result.gain} == {("batch=4", 1)}
    assert tuple(read_measured(tmp_path / "bundle").gain) == result.gain
    report = (tmp_path / "bundle" / "report.html").read_text(encoding="utf-8")
    assert " times as fast as PyTorch<small>" in report
    assert " ms at batch=4; 1 thread; 95 % interval " in report
    summary = result.summary()
    assert f"{result.gain[0].ms:.3g} ms, {result.gain[0].speedup:.2f}"[:-1] in summary
    assert "  one call, compared with PyTorch at batch=4; 1 thread" in summary.splitlines()


@pytest.mark.usefixtures("timed")
def test_shapes_are_named_if_no_size_is_dynamic(tmp_path: Path) -> None:
    (record,) = optexport.export(
        Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=["onnx"], dynamic={}
    ).gain
    assert record.setting == "input=4x16; 1 thread"


@pytest.mark.usefixtures("timed")
def test_a_model_that_writes_to_its_inputs_and_itself_is_timed_without_harm(tmp_path: Path) -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(16, 8), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x.add_(1)
            return self.linear(x)  # type: ignore[no-any-return]

    model, example = Writer().eval(), torch.zeros(4, 16)
    result = optexport.export(model, example, tmp_path / "bundle", formats=["torchscript"])
    assert len(result.gain) == 1
    assert float(example.sum()) == 0
    assert model.calls == 0


@pytest.mark.parametrize("writes", [False, True])
def test_timed_calls_copy_inputs_only_if_the_model_changes_them(tmp_path: Path, writes: bool) -> None:
    received, sums = [], []

    class Recorder(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            received.append(x)
            sums.append(float(x.sum()))
            if writes:
                x.add_(1)

    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    call = gain.read_eager(Recorder(), tmp_path / "x.safetensors")()
    call()
    call()
    assert sums == [0, 0, 0]
    assert (received[-1] is received[-2]) is not writes


@pytest.mark.usefixtures("timed")
def test_a_file_that_pytorch_runs_itself_is_not_timed(tmp_path: Path) -> None:
    result = optexport.export(Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=["pt2"])
    assert (result.gain, result.gain_skipped) == ((), "PyTorch itself runs these files")


def test_the_reason_for_missing_times_is_in_the_summary_and_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gain, "SECONDS", 1e-9)
    result = optexport.export(Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=["onnx"])
    assert result.gain == ()
    reason = "3 rounds of PyTorch and the files take more than 1e-09 s"
    assert f"  speed not compared with PyTorch: {reason}" in result.summary().splitlines()
    measured = read_measured(tmp_path / "bundle")
    assert (measured.gain, measured.gain_skipped) == ([], reason)
    assert reason in (tmp_path / "bundle" / "report.html").read_text(encoding="utf-8")
    assert "gain" not in json.loads((tmp_path / "bundle" / "measurements.json").read_text())


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("formats", [["onnx"], ["onnx", "torchscript"]])
def test_a_file_that_cannot_be_timed_leaves_the_others(tmp_path: Path, formats: list[str]) -> None:
    model = Program(lambda m, x: m.linear(x.float()), linear=nn.Linear(16, 8)).eval()
    example = {"x": torch.randn(4, 16).bfloat16()}  # benchmarks of ONNX files read inputs as arrays of NumPy
    result = optexport.export(model, example, tmp_path / "bundle", formats=formats)
    assert [record.format for record in result.gain] == formats[1:]
    assert result.gain_skipped.startswith("onnx cannot be timed: ")
    lines = [line for line in result.summary().splitlines() if "compared with PyTorch" in line]
    assert len(lines) == len(formats)


@pytest.mark.usefixtures("timed")
def test_a_model_that_refuses_further_calls_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no more calls")

    monkeypatch.setattr(gain, "read_eager", lambda model, inputs: refuse)
    result = optexport.export(Mlp().eval(), torch.randn(4, 16), tmp_path / "bundle", formats=["onnx"])
    assert (result.gain, result.gain_skipped) == ((), "a call failed: RuntimeError: no more calls")


def test_every_call_has_as_many_turns() -> None:
    calls: list[str] = []
    seconds = gain._time_in_turns([lambda: calls.append("a"), lambda: calls.append("b")], float("inf"))
    assert seconds is not None
    assert seconds.shape == (gain.ROUNDS, 2)
    assert ((seconds > 0) & (seconds < 1)).all()
    order = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    assert order == ["a", "b"] * gain.ROUNDS


def test_a_slow_call_is_not_repeated() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.1)

    end = time.perf_counter() + 0.05
    assert gain._open(lambda: call, end) is call
    assert gain._time_in_turns([call, call], end) is None
    assert len(calls) == 1


def summary(speedup: float, low: float, high: float, outcomes: tuple[Outcome, ...] = ()) -> list[str]:
    """Returns the lines of a summary about files of this speed."""
    record = GainRecord(
        format="onnx", ms=2.0, original_ms=2.0 * speedup, speedup=speedup, low=low, high=high,
        sizes="batch=4,sequence=19", threads=2,
    )  # fmt: skip
    result = replace(exports.exported(), gain=(record,), gain_skipped="", tuned=outcomes)
    return result.summary().splitlines()


def test_a_wide_interval_is_shown_within_80_columns() -> None:
    lines = summary(1.666, 1.234, 1.777)
    (line,) = [line for line in lines if line.startswith("  model.onnx")]
    assert line.endswith("  2 ms, 1.67 (1.23 to 1.78) times as fast")
    assert len(line) <= 80
    assert "  one call, compared with PyTorch at batch=4, sequence=19; 2 threads" in lines
    assert any(line.endswith("  2 ms, 1.67 times as fast") for line in summary(1.666, 1.64, 1.69))


def test_only_a_file_that_is_certainly_slower_has_a_hint() -> None:
    hint = "  Hint: onnx is slower than PyTorch; tuning may find faster rules and passes"
    assert hint in summary(0.8, 0.7, 0.99)
    assert len(hint) <= 80
    assert not any("Hint: " in line for line in summary(0.8, 0.7, 1.01))
    chosen = Trial("as configured", (), ())
    tuned = Outcome("onnx", chosen, "as configured", None, (chosen,))
    assert "  Hint: onnx is slower than PyTorch; lower precision may help" in summary(0.8, 0.7, 0.99, (tuned,))
