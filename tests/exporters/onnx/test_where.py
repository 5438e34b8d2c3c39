"""Choices between tensors of types that ONNX Runtime has no Where for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests._helpers.graphs import Program
from tests.exporters import files


def _chooses(m: nn.Module, x: torch.Tensor) -> Any:
    mask, small = x > 0, (x * 10).to(torch.int16)
    masks = torch.where(x > 1, mask, x < -1), mask.masked_fill(x > 2, False), torch.where(mask, True, x < -0.5)
    return (
        *masks,
        torch.where(mask, small, small * 3),
        small.masked_fill(mask, 7),
        torch.where(x.sum() > 0, mask, ~mask),
    )


def test_masks_and_small_whole_numbers_are_chosen(tmp_path: Path) -> None:
    inputs = [{"x": torch.randn(rows, 4) * 3} for rows in (1, 5, 8)]
    files.assert_onnx(Program(_chooses), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}}, tmp_path, *inputs)
