"""Special functions in ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests._helpers.graphs import Program
from tests.exporters import files


def _values(m: nn.Module, x: torch.Tensor) -> Any:
    y = x.flip(1)
    pairs = [of(x, y) for of in (torch.fmax, torch.fmin, torch.hypot)]
    return (
        torch.lgamma(x),
        torch.digamma(x),
        *pairs,
        torch.copysign(x, y * 0),
        functional.rrelu(x),
        x.masked_select(x > 0),
        x.copysign(-1.0),
    )


@pytest.mark.slow
def test_functions_without_an_operator_are_written(tmp_path: Path) -> None:
    example, dynamic = {"x": torch.randn(4, 5)}, {"x": {0: "rows", 1: "columns"}}
    ends = torch.tensor([[torch.inf, 1e20, -3.0, 0.25, torch.nan, 2.0, 1.0, -0.5, 1e20, 150.0, 0.0]])
    files.assert_onnx(Program(_values), example, dynamic, tmp_path, {"x": torch.randn(7, 6) * 5}, {"x": ends})


def _integers(m: nn.Module, x: torch.Tensor) -> Any:
    y = x.flip(1)
    dtypes = torch.int64, torch.int32, torch.int8, torch.uint8
    extremes = [of(x.to(dtype), y.to(dtype)) for of in (torch.fmax, torch.fmin) for dtype in dtypes]
    mixed = torch.fmax(x / 3, y), torch.fmin(x.int(), y)
    return extremes, mixed, torch.copysign(x, y - 3), torch.copysign(x, -2), torch.copysign(x.byte(), -2.0)


@pytest.mark.slow
def test_functions_of_integers_are_written(tmp_path: Path) -> None:
    """ONNX Runtime refused IsNaN of integers, and the minimum of bytes was wrong."""
    model, example, dynamic = Program(_integers), {"x": torch.arange(6).reshape(2, 3)}, {"x": {0: "rows"}}
    files.assert_onnx(model, example, dynamic, tmp_path, {"x": torch.tensor([[0, 5, 2], [7, 100, 3], [1, 0, 250]])})
