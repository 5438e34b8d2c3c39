"""Medians, elements by rank, and running products in ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import Dim
from tests._helpers.graphs import Program
from tests.exporters import files

SIZES = {"x": {0: Dim("rows", 2, 40), 1: Dim("columns", 2, 40)}}


def _medians(m: nn.Module, x: torch.Tensor) -> Any:
    whole = (x * 100).round().long()
    along = [x.median(1), x.median(0, keepdim=True), whole.int().median(1).values, whole.short().median(1).values]
    return x.median(), whole.median(), *along


@pytest.mark.slow
def test_median_is_the_lower_of_two_in_the_middle(tmp_path: Path) -> None:
    example = {"x": torch.randn(4, 5)}
    files.assert_onnx(Program(_medians), example, SIZES, tmp_path, {"x": torch.randn(7, 6)}, {"x": torch.randn(2, 3)})


def _ranks(m: nn.Module, x: torch.Tensor) -> Any:
    return (
        x.median(1),
        x.median(),
        x.nanmedian(1).values,
        x.nanmedian(),
        x.kthvalue(2, 1),
        x.kthvalue(x.shape[0] // 2, 0),
    )


@pytest.mark.slow
def test_nan_is_the_median_or_left_out(tmp_path: Path) -> None:
    nan = torch.nan
    gaps = torch.tensor(
        [[nan, 3, 1, nan, 2, -1], [1, 2, 3, 4, 5, 6], [7, nan, 6, torch.inf, -3, 0], [3, 2, 8, 0, nan, 9]]
    )
    files.assert_onnx(Program(_ranks), {"x": torch.randn(4, 5)}, SIZES, tmp_path, {"x": gaps}, {"x": torch.randn(9, 2)})


def _running(m: nn.Module, x: torch.Tensor) -> Any:
    y = x.clone()
    y[:, 1:].cumprod_(0)
    whole = (x * 2).round().int()
    return x.cumprod(1), y, whole.cumprod(-1), x.cumprod(0, dtype=torch.float64), x.logcumsumexp(1)


@pytest.mark.slow
def test_running_products_have_any_length(tmp_path: Path) -> None:
    dynamic = {"x": {0: Dim("rows", 2, 40), 1: Dim("columns", 3, 40)}}
    example = {"x": torch.randn(4, 5)}
    files.assert_onnx(Program(_running), example, dynamic, tmp_path, {"x": torch.randn(9, 7)}, {"x": torch.zeros(2, 3)})
