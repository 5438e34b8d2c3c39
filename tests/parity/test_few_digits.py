"""Tests the warnings about a large noise floor and about outputs of only zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import fx, nn

from optexport.errors import ParityError
from optexport.report import terminal
from optexport.transformations import Transformation
from tests._helpers import exports
from tests._helpers.models import randomise


class OtherwiseInFloat64(nn.Module):
    """Branches on the dtype, as hand-written kernels do, so the difference counts as noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x) if x.dtype == torch.float32 else nn.functional.gelu(x)


def test_a_large_noise_floor_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = exports.quick(OtherwiseInFloat64(), {"x": exports.X}, tmp_path / "bundle", dynamic=exports.BATCH)
    (output,) = result.manifest.few_digits
    assert float(output.split("(noise floor ")[1].split(",")[0]) == pytest.approx(0.02, rel=0.1)
    terminal.show(result, Console(width=200))
    assert (
        f"large noise floor: the original differs from float64 in {output}; errors of that size pass"
        in capsys.readouterr().out
    )
    assert (
        f"The original differs from float64 in {output}: errors of that size pass"
        in (result.output / "report.html").read_text()
    )


@pytest.mark.slow
def test_no_warning_with_a_tolerance_or_an_ordinary_model(tmp_path: Path) -> None:
    fixed = exports.quick(OtherwiseInFloat64(), {"x": exports.X}, tmp_path / "bundle", atol=1e-6)
    assert fixed.manifest.few_digits == []
    assert exports.exported().manifest.few_digits == []


class OftenZero(nn.Module):
    """Returns zeros for ordinary inputs, but not for inputs 64 times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x) - 8)


class ByAHundredth(Transformation):
    preserves_computation = True

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        layer = graph_module.get_submodule("layer")
        assert isinstance(layer, nn.Linear)
        layer.bias = nn.Parameter(layer.bias.detach() + 0.01)
        return graph_module


@pytest.mark.slow
def test_only_zeros_are_reported_and_make_extreme_cases_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of 0.01 passed, because the limits of extreme cases are loose."""
    model, x = randomise(OftenZero()), {"x": torch.linspace(-1, 1, 24).reshape(4, 6)}
    result = exports.quick(model, x, tmp_path / "bundle", dynamic=exports.BATCH)
    assert result.manifest.only_zeros == [output.name for output in result.manifest.outputs]
    terminal.show(result, Console(width=200))
    assert "only zeros: output is zero in all ordinary cases" in capsys.readouterr().out
    assert "In all ordinary cases output is zero" in (result.output / "report.html").read_text()
    assert exports.exported().manifest.only_zeros == []
    with pytest.raises(ParityError, match="values 64 times as large"):
        quick = {"dynamic": exports.BATCH, "transformations": [ByAHundredth()]}
        exports.quick(model, x, tmp_path / "wrong", **quick)
