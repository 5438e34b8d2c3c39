"""A floor so large that it may hide a fault is told wherever a proof is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from optexport import summary
from tests import exports


class OtherwiseInFloat64(nn.Module):
    """Code that looks at the dtype, as hand-written kernels do: the proof takes the difference for noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x) if x.dtype == torch.float32 else nn.functional.gelu(x)


def test_an_original_that_shares_few_digits_with_float64_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = exports.quick(OtherwiseInFloat64(), {"x": exports.X}, tmp_path / "bundle", dynamic=exports.BATCH)
    (told,) = result.manifest.few_digits
    assert float(told.split(" by ")[1].split(",")[0]) == pytest.approx(0.02, rel=0.1)
    summary.show(result, Console(width=200))
    assert f"few digits: float64 differs in {told}: a fault of that size passes" in capsys.readouterr().out
    assert f"The original differs from float64 in {told}: a fault" in (result.output / "report.html").read_text()


def test_with_a_tolerance_and_of_an_ordinary_model_nothing_is_told(tmp_path: Path) -> None:
    fixed = exports.quick(OtherwiseInFloat64(), {"x": exports.X}, tmp_path / "bundle", atol=1e-6)
    assert fixed.manifest.few_digits == []
    assert exports.exported().manifest.few_digits == []
