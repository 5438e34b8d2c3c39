"""Tests of the ONNX functions that replace operators, at sizes that were never traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests.exporters import files

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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("pools", "axes"), [(_pools_1, 1), (_pools_2, 2), (_pools_3, 3)])
def test_adaptive_pooling_works_at_uneven_sizes(pools: Any, axes: int, tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 3, *(6, 9, 7)[:axes])}  # 6 and 9 divide evenly, unlike most other sizes
    dynamic = {"x": {0: "batch", **{2 + axis: f"size_{axis}" for axis in range(axes)}}}
    model = Program(pools)
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(3, 3, *size[:axes])} for size in _SIZES))


@pytest.mark.slow
def test_pooling_to_computed_sizes_is_written(tmp_path: Path) -> None:
    def pools(m: nn.Module, x: torch.Tensor) -> Any:
        height, width = x.shape[2:]
        halved = functional.adaptive_avg_pool2d(x, (height // 2, width // 2))
        return halved, functional.avg_pool1d(x.flatten(1, 2), width // 2), functional.max_pool2d(x, (height, width))

    dynamic: Any = {"x": {0: "batch", 2: Dim("height", 4, 40), 3: Dim("width", 4, 40)}}
    others = ({"x": torch.randn(3, 3, height, width)} for height, width in ((4, 5), (9, 13), (31, 20)))
    files.assert_onnx(Program(pools), {"x": torch.randn(2, 3, 8, 12)}, dynamic, tmp_path, *others)


@pytest.mark.slow
def test_adaptive_pooling_of_a_fixed_size_is_written(tmp_path: Path) -> None:
    def pools(m: nn.Module, x: torch.Tensor) -> Any:
        average, maximum = functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d
        in_two = [[average(x, size), maximum(x, size, return_indices=True)] for size in ((3, 3), (3, 4))]
        return in_two, functional.adaptive_avg_pool3d(x[:, None], (1, 3, 2))

    example = {"x": torch.randn(2, 3, 6, 9)}
    files.assert_onnx(Program(pools), example, {"x": {0: "batch"}}, tmp_path, {"x": torch.randn(5, 3, 6, 9)})


@pytest.mark.slow
def test_squeeze_keeps_axes_that_are_not_of_size_1(tmp_path: Path) -> None:
    model = Program(lambda m, x: (x.squeeze(1), x.squeeze(2), x.squeeze((0, 2)), x.squeeze(0), x.squeeze(), x))
    files.assert_onnx(model, {"x": torch.randn(3, 4, 1)}, {"x": {0: "batch"}}, tmp_path, {"x": torch.randn(5, 4, 1)})


class Placed(nn.Module):
    """Writes exponentials into the rows that begin with a positive number. There may be no such rows."""

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


@pytest.mark.slow
@pytest.mark.parametrize("scattered", [False, True])
def test_mask_without_true_elements_writes_nothing(scattered: bool, tmp_path: Path) -> None:
    example = {"x": torch.linspace(-1, 1, 12).reshape(3, 4)}
    model = Placed(scattered=scattered)
    x = torch.randn(5, 4)
    files.assert_onnx(model, example, {"x": {0: "batch"}}, tmp_path, {"x": x}, {"x": -x.abs()}, {"x": x.abs()})


def _resized(m: nn.Module, x: torch.Tensor) -> Any:
    fixed = [functional.interpolate(x, size=size) for size in ((4, 9), (3, 28))]
    return fixed, functional.interpolate(x, scale_factor=2), functional.interpolate(x, size=(x.shape[2] // 3 + 1, 5))


@pytest.mark.slow
def test_nearest_neighbours_are_the_same_as_in_torch(tmp_path: Path) -> None:
    dynamic = {"x": {0: "batch", 2: "height", 3: "width"}}
    model, example = Program(_resized), {"x": torch.randn(2, 3, 14, 12)}
    sizes = [(14, 14), (14, 12), (10, 49), (33, 7), (5, 28)]
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(3, 3, *size)} for size in sizes))


@pytest.mark.slow
def test_scale_factor_that_keeps_the_size_still_moves_elements(tmp_path: Path) -> None:
    """ONNX Runtime copies the input if the size stays the same."""
    model = Program(lambda m, x: [functional.interpolate(x, scale_factor=factor) for factor in (1.3, 1.5, 0.75, 2)])
    example, dynamic = {"x": torch.randn(2, 3, 9)}, {"x": {0: "batch", 2: Dim("length", 2, 64)}}
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(3, 3, size)} for size in (2, 3, 4, 7, 32)))


def _floors(m: nn.Module, x: torch.Tensor) -> Any:
    quotients = x.round().long()
    fractions = [x // 0.7, x.double() // 0.7, torch.div(x, torch.tensor(-0.7), rounding_mode="floor"), quotients // 0.7]
    return (
        fractions,
        x // x.shape[1],
        quotients // 3,
        quotients // -x.shape[1],
        torch.div(x, 0.7, rounding_mode="trunc"),
    )


@pytest.mark.slow
def test_floor_division_rounds_as_torch_does(tmp_path: Path) -> None:
    model, example, dynamic = Program(_floors), {"x": torch.randn(4, 5)}, {"x": {0: "rows", 1: "columns"}}
    multiples = torch.arange(-40, 40).reshape(8, 10) * 0.7  # torch gives -11 for -7 // 0.7
    files.assert_onnx(
        model, example, dynamic, tmp_path, {"x": multiples}, {"x": multiples.round()}, {"x": torch.randn(3, 7) * 9}
    )


def _whole_quotients(m: nn.Module, x: torch.Tensor) -> Any:
    x, y = x[:, :2], x[:, 2:]
    hours = x // 3600 % 24
    both = [torch.div(x, y, rounding_mode=mode) for mode in ("floor", "trunc")]  # type: ignore[call-overload]
    return hours, both, torch.div(x, -7, rounding_mode="trunc"), (x % 30_000).short() // 7, (x % 250).byte() // 3


@pytest.mark.slow
def test_integer_quotients_are_exact_for_large_numbers(tmp_path: Path) -> None:
    """``torch.onnx`` divides in float32. Wrong hours of time stamps passed the checks."""
    subject = files.prepare(
        Program(_whole_quotients), {"x": torch.tensor([[1_699_999_199, -7, 3600, 2]] * 2)}, {"x": {0: "rows"}}
    )
    files.save_onnx(subject, tmp_path / "model.onnx")
    generator = torch.Generator().manual_seed(0)
    for limit in (100, 2**32, 2**62):
        x = torch.randint(-limit, limit, (500, 2), generator=generator)
        y = torch.randint(1, 1000, (500, 2), generator=generator) * torch.tensor([[1, -1]])
        files.assert_outputs(subject, tmp_path / "model.onnx", {"x": torch.cat([x, y], 1)})


def _logarithms(m: nn.Module, x: torch.Tensor) -> Any:
    sums = [of(x, y) for of in (torch.logaddexp, torch.logaddexp2) for y in (x.flip(1), x)]
    return functional.logsigmoid(x), *sums


@pytest.mark.slow
def test_logarithms_of_overflowing_exponentials_are_finite(tmp_path: Path) -> None:
    model, example, dynamic = Program(_logarithms), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}}
    ends = torch.tensor([[-1e4, -104.0, -88.5, 0.0, 30.0], [1e4, 104.0, 88.5, -1.0, -1e4]])
    files.assert_onnx(
        model, example, dynamic, tmp_path, {"x": ends}, {"x": torch.tensor([[-torch.inf, 2, 3, 2, -torch.inf]])}
    )


def _rests(m: nn.Module, x: torch.Tensor) -> Any:
    integers = x.round().long()
    return (
        x % 0.1,
        x % -0.7,
        2.5 % x,
        x % x.flip(1),
        integers % 3,
        integers % 0.7,
        x.double() % 0.1,
        x % x.shape[1],
        integers % x.shape[0],
    )


def test_remainder_is_exact(tmp_path: Path) -> None:
    """``torch.onnx`` subtracts a rounded product, which is inexact for large numbers."""
    model, example, dynamic = Program(_rests), {"x": torch.randn(4, 5)}, {"x": {0: "rows", 1: "columns"}}
    integers = torch.arange(1, 81).reshape(8, 10).float()
    files.assert_onnx(
        model, example, dynamic, tmp_path, {"x": integers}, {"x": -integers * 1e5}, {"x": torch.randn(3, 7) * 1e6}
    )


@pytest.mark.slow
def test_remainder_of_a_division_by_infinity_is_the_dividend(tmp_path: Path) -> None:
    model, example, dynamic = Program(lambda m, x: x % x[:1].exp()), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}}
    files.assert_onnx(
        model, example, dynamic, tmp_path, {"x": torch.tensor([[100.0] * 5, [-2.0, -0.5, 0.0, 0.5, 2.0]])}
    )


def _reduced(m: nn.Module, x: torch.Tensor) -> Any:
    index = (x.abs() * 3).long().clamp(max=4)
    kinds = [(kind, itself) for kind in ("sum", "mean", "amax", "amin", "prod") for itself in (True, False)]
    fractions = [(x + 1).scatter_reduce(1, index, x, kind, include_self=itself) for kind, itself in kinds]
    integers = torch.arange(-2, 3) + index
    return fractions, [
        integers.scatter_reduce(1, index, integers - 5, kind, include_self=itself) for kind, itself in kinds
    ]


@pytest.mark.slow
def test_scatter_reduces_with_and_without_the_present_values(tmp_path: Path) -> None:
    """Includes means, for which ONNX has no reduction."""
    model, example = Program(_reduced), {"x": torch.randn(4, 5)}
    files.assert_onnx(model, example, {"x": {0: "rows"}}, tmp_path, {"x": torch.randn(7, 5)}, {"x": torch.zeros(2, 5)})


def _extremes(m: nn.Module, x: torch.Tensor) -> Any:
    index = torch.tensor([0, 0, 2, 4, 4]).expand(x.shape)
    return [torch.ones_like(x).scatter_reduce(1, index, x, kind, include_self=False) for kind in ("amax", "amin")]


@pytest.mark.slow
def test_extreme_of_infinite_numbers_only_is_infinite(tmp_path: Path) -> None:
    model, example, dynamic = Program(_extremes), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}}
    infinite = torch.tensor([-torch.inf, -torch.inf, torch.inf, -torch.inf, torch.inf])[None]
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": infinite}, {"x": -infinite}, {"x": torch.randn(3, 5)})


@pytest.mark.slow
def test_a_running_extreme_may_be_infinite(tmp_path: Path) -> None:
    model = Program(lambda m, x: (x.cummax(1), x.cummin(0)))
    example = {"x": torch.randn(4, 5)}
    dynamic = {"x": {0: "rows"}}
    low = torch.tensor([[-torch.inf, -torch.inf, -torch.finfo(torch.float32).max, 1.0, torch.inf]])
    files.assert_onnx(
        model, example, dynamic, tmp_path, {"x": low}, {"x": -low}, {"x": torch.cat([-low, low.flip(1), low])}
    )


def _turned(m: nn.Module, x: torch.Tensor) -> Any:
    half = x.shape[1] // 2
    return x.roll(-7, 1), x.roll(half, 1), x.roll((2, -7), (1, 0)), x.roll(3), x[:, :5].roll(2, 1)


@pytest.mark.slow
def test_roll_works_at_every_size(tmp_path: Path) -> None:
    """A roll by 7 changes nothing at the traced size 7, but it does at other sizes."""
    model, example, dynamic = Program(_turned), {"x": torch.randn(4, 7)}, {"x": {0: "rows", 1: Dim("columns", 5, 40)}}
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(2, size)} for size in (5, 6, 8, 10)))


@pytest.mark.slow
def test_roll_by_the_full_size_has_its_own_output(tmp_path: Path) -> None:
    model = Program(lambda m, x: (x.roll(5, 1), x + 1))
    files.assert_onnx(model, {"x": torch.randn(4, 5)}, {"x": {0: "rows"}}, tmp_path, {"x": torch.randn(2, 5)})


def _inverses(m: nn.Module, x: torch.Tensor) -> Any:
    return torch.erfinv(x), torch.erfinv(x.double())


@pytest.mark.slow
def test_erfinv_is_written_in_both_precisions(tmp_path: Path) -> None:
    model, example, dynamic = Program(_inverses), {"x": torch.rand(4, 5)}, {"x": {0: "rows"}}
    ends = torch.tensor([[-1.0, -0.9999999, -0.85, -0.1, 0.0], [1.0, 0.9999999, 0.8500001, 1e-20, 0.5]])
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": ends}, {"x": torch.linspace(-1, 1, 300).reshape(60, 5)})
