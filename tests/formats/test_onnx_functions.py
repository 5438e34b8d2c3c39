"""Functions that stand for operators in ONNX files: they compute the same at sizes that were never traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.formats import files
from tests.transformations.programs import Program

_SIZES = [(8, 9, 7), (5, 5, 5), (7, 11, 3), (2, 3, 2), (1, 1, 1), (13, 16, 9)]


def _pools_1(m: nn.Module, x: torch.Tensor) -> Any:
    return functional.adaptive_avg_pool1d(x, 3), functional.adaptive_max_pool1d(x.round(), 3, return_indices=True)


def _pools_2(m: nn.Module, x: torch.Tensor) -> Any:
    largest = (
        functional.adaptive_max_pool2d(x.round(), (2, 3), return_indices=True),
        functional.adaptive_max_pool2d(x, 1),
    )
    return [functional.adaptive_avg_pool2d(x, size) for size in ((2, 3), (1, None), 1)], largest


def _pools_3(m: nn.Module, x: torch.Tensor) -> Any:
    largest = functional.adaptive_max_pool3d(x.round(), (2, 3, 1), return_indices=True)
    return functional.adaptive_avg_pool3d(x, (2, 3, 1)), largest


@pytest.mark.parametrize(("pools", "axes"), [(_pools_1, 1), (_pools_2, 2), (_pools_3, 3)])
def test_adaptive_pooling_has_windows_of_the_size_that_it_is_given(pools: Any, axes: int, tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 3, *(6, 9, 7)[:axes])}  # 6 and 9 part evenly, and most others do not
    dynamic = {"x": {0: "batch", **{2 + axis: f"size_{axis}" for axis in range(axes)}}}
    made = files.prepare(Program(pools), example, dynamic)
    files.save_onnx(made, tmp_path / "model.onnx")
    files.runs(made, tmp_path / "model.onnx", *({"x": torch.randn(3, 3, *size[:axes])} for size in _SIZES))


def test_adaptive_pooling_of_a_fixed_size_is_written(tmp_path: Path) -> None:
    def pools(m: nn.Module, x: torch.Tensor) -> Any:
        average, most = functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d
        in_two = [[average(x, size), most(x, size, return_indices=True)] for size in ((3, 3), (3, 4))]
        return in_two, functional.adaptive_avg_pool3d(x[:, None], (1, 3, 2))

    made = files.prepare(Program(pools), {"x": torch.randn(2, 3, 6, 9)}, {"x": {0: "batch"}})
    files.save_onnx(made, tmp_path / "model.onnx")
    files.runs(made, tmp_path / "model.onnx", {"x": torch.randn(5, 3, 6, 9)})


def test_axes_that_are_not_of_size_1_are_not_taken_away(tmp_path: Path) -> None:
    model = Program(lambda m, x: (x.squeeze(1), x.squeeze(2), x.squeeze((0, 2)), x.squeeze(0), x.squeeze(), x))
    made = files.prepare(model, {"x": torch.randn(3, 4, 1)}, {"x": {0: "batch"}})
    files.save_onnx(made, tmp_path / "model.onnx")
    files.runs(made, tmp_path / "model.onnx", {"x": torch.randn(5, 4, 1)})


class Placed(nn.Module):
    """Puts exponentials where rows begin with a positive number, as none may."""

    def __init__(self, *, scattered: bool) -> None:
        super().__init__()
        self.scattered = scattered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[:, 0] > 0
        rows = x[mask].exp()
        if self.scattered:
            return x.masked_scatter(mask[:, None], rows)
        y = x.clone()
        y[mask] = rows
        return y


@pytest.mark.parametrize("scattered", [False, True])
def test_where_a_mask_is_true_nowhere_nothing_is_put(scattered: bool, tmp_path: Path) -> None:
    example = {"x": torch.linspace(-1, 1, 12).reshape(3, 4)}
    made = files.prepare(Placed(scattered=scattered), example, {"x": {0: "batch"}})
    files.save_onnx(made, tmp_path / "model.onnx")
    x = torch.randn(5, 4)
    files.runs(made, tmp_path / "model.onnx", {"x": x}, {"x": -x.abs()}, {"x": x.abs()})


def _resized(m: nn.Module, x: torch.Tensor) -> Any:
    fixed = [functional.interpolate(x, size=size) for size in ((4, 9), (3, 28))]
    return fixed, functional.interpolate(x, scale_factor=2), functional.interpolate(x, size=(x.shape[2] // 3 + 1, 5))


def test_nearest_neighbours_are_those_that_torch_reads(tmp_path: Path) -> None:
    dynamic = {"x": {0: "batch", 2: "height", 3: "width"}}
    made = files.prepare(Program(_resized), {"x": torch.randn(2, 3, 14, 12)}, dynamic)
    files.save_onnx(made, tmp_path / "model.onnx")
    sizes = [(14, 14), (14, 12), (10, 49), (33, 7), (5, 28)]
    files.runs(made, tmp_path / "model.onnx", *({"x": torch.randn(3, 3, *size)} for size in sizes))


def _floors(m: nn.Module, x: torch.Tensor) -> Any:
    whole = x.round().long()
    fractions = [x // 0.7, x.double() // 0.7, torch.div(x, torch.tensor(-0.7), rounding_mode="floor"), whole // 0.7]
    return fractions, x // x.shape[1], whole // 3, whole // -x.shape[1], torch.div(x, 0.7, rounding_mode="trunc")


def test_a_quotient_is_rounded_down_from_where_torch_does(tmp_path: Path) -> None:
    made = files.prepare(Program(_floors), {"x": torch.randn(4, 5)}, {"x": {0: "rows", 1: "columns"}})
    files.save_onnx(made, tmp_path / "model.onnx")
    multiples = torch.arange(-40, 40).reshape(8, 10) * 0.7  # of -7 by 0.7 torch gives -11
    files.runs(made, tmp_path / "model.onnx", {"x": multiples}, {"x": multiples.round()}, {"x": torch.randn(3, 7) * 9})


def _logarithms(m: nn.Module, x: torch.Tensor) -> Any:
    return functional.logsigmoid(x), torch.logaddexp(x, x.flip(1)), torch.logaddexp(x, x)


def test_logarithms_of_what_overflows_are_finite(tmp_path: Path) -> None:
    made = files.prepare(Program(_logarithms), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}})
    files.save_onnx(made, tmp_path / "model.onnx")
    ends = torch.tensor([[-1e4, -104.0, -88.5, 0.0, 30.0], [1e4, 104.0, 88.5, -1.0, -1e4]])
    files.runs(made, tmp_path / "model.onnx", {"x": ends}, {"x": torch.tensor([[-torch.inf, 2, 3, 2, -torch.inf]])})
