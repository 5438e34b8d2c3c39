"""Tests of single operators in ONNX files: precision and signs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fft, nn

from optexport import export
from tests._helpers.graphs import Program
from tests.exporters import files


def _numbers(m: nn.Module, x: torch.Tensor) -> Any:
    return (
        x * 0.1 + 0.3,
        x.clamp(-0.7, 0.7) / 3.3,
        2.1**x,
        torch.where(x > 0.1, 0.1, x),
        x.masked_fill(x > 0, torch.finfo(x.dtype).min),
        x.masked_fill(x > 0, 0.7),
        torch.cat([x, torch.full((1, 6), 0.1, dtype=x.dtype), torch.full_like(x, 0.1), x.new_full((1, 6), 0.1)]),
        x.clone().fill_(0.1) * x,
    )


def test_python_number_is_not_rounded_to_float32(tmp_path: Path) -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    subject = export(Program(_numbers).eval(), {"x": x}, tmp_path / "bundle", formats=["onnx"], effort="quick")
    assert subject.passed


def test_clamp_takes_bounds_of_two_types(tmp_path: Path) -> None:
    """torch.onnx found no overload of aten.clamp."""

    def clamped(m: nn.Module, x: torch.Tensor) -> Any:
        n = (x * 3).long()
        return x.clamp(0, 0.999), x.clamp(max=1), n.clamp(0, 3), n.clamp(0, 2.5), (x * 2).clamp_(-1, 0.5)

    inputs = {"x": torch.tensor([-1.0, 0.5, 2.0])}
    files.assert_onnx(Program(clamped), inputs, {}, tmp_path, inputs)


@pytest.mark.slow
def test_float32_model_may_compute_in_float64(tmp_path: Path) -> None:
    def angles(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.double() * 1234567.1).float()  # a factor in float32 makes the angle wrong by 0.1

    x = torch.rand(3, 6)
    subject = export(Program(angles).eval(), {"x": x}, tmp_path / "bundle", formats=["onnx"], effort="quick")
    assert subject.passed


@pytest.mark.slow
def test_atan2_is_right_for_signed_zeros_and_infinities(tmp_path: Path) -> None:
    model, example = Program(lambda m, x: torch.atan2(*x)), {"x": torch.randn(2, 3)}
    numbers = torch.tensor([-torch.inf, -2, -1, -0.0, 0, 1, 2, torch.inf])
    points = torch.cartesian_prod(numbers, numbers).T
    files.assert_onnx(model, example, {"x": {1: "points"}}, tmp_path, {"x": points[:, points.isfinite().any(0)]})


def test_logarithms_of_sizes_are_exact_at_powers(tmp_path: Path) -> None:
    """The file had 2 for log2(8), and 2 for log10(1000)."""

    def scaled(m: nn.Module, x: torch.Tensor) -> Any:
        return x * math.floor(math.log2(x.shape[1])), x * math.floor(math.log10(x.shape[1])), x.abs().double().log10()

    sizes = (1, 2, 3, 8, 64, 100, 1000)
    batches = [{"x": torch.randn(2, size)} for size in sizes]
    files.assert_onnx(Program(scaled), {"x": torch.randn(2, 10)}, {"x": {1: "time"}}, tmp_path, *batches)


def _diagonals(m: nn.Module, x: torch.Tensor) -> Any:
    within = [x.diagonal(offset, 1, 2) for offset in (0, 1, -2, 9)]
    return within, x.diagonal(-1, -1, 0), x.diagonal(), (x > 0).diagonal(0, 1, 2), x.round().long().diagonal(1, 2, 1)


@pytest.mark.slow
def test_diagonal_is_the_same_as_in_torch_at_other_sizes(tmp_path: Path) -> None:
    model, example, dynamic = Program(_diagonals), {"x": torch.randn(2, 4, 3)}, {"x": {0: "batch", 1: "rows"}}
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": torch.randn(3, 5, 3)}, {"x": torch.randn(4, 1, 3)})


@pytest.mark.slow
def test_diagonal_with_infinite_neighbours_is_finite(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 4, 4)}
    masked = torch.randn(3, 4, 4).masked_fill(~torch.eye(4, dtype=torch.bool), -torch.inf)
    files.assert_onnx(Program(lambda m, x: x.diagonal(0, 1, 2)), example, {"x": {0: "batch"}}, tmp_path, {"x": masked})


@pytest.mark.slow
def test_fourier_transforms_are_as_exact_as_float64(tmp_path: Path) -> None:
    def there_and_back(m: nn.Module, x: torch.Tensor) -> Any:
        half = fft.rfft(x)
        return half.real, half.imag, fft.irfft(half * 2, n=x.shape[1]), torch.view_as_real(fft.fft(x, norm="ortho"))

    x = torch.randn(3, 7, dtype=torch.float64)
    subject = export(Program(there_and_back).eval(), {"x": x}, tmp_path / "bundle", formats=["onnx"], effort="quick")
    assert subject.passed
