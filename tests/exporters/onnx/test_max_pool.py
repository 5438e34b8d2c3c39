"""Tests of max pooling in ONNX files, also with infinite numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests._helpers.graphs import Program
from tests.exporters import files

_BATCH = {"x": {0: "batch"}}


def test_zeros_padded_before_a_max_pool_stay_zeros(tmp_path: Path) -> None:
    """ONNX Runtime fuses Pad into MaxPool, whose padding is minus infinity instead of zero."""
    model = Program(lambda m, x: functional.max_pool2d(functional.pad(x, (1, 1, 1, 1)), 3, 2))
    x = -1 - torch.rand(2, 3, 8, 8)
    files.assert_onnx(model, {"x": x}, _BATCH, tmp_path, {"x": x})


def _windows(m: nn.Module, x: torch.Tensor) -> Any:
    small, flat = functional.max_pool2d(x, 3, 2, 1), functional.max_pool1d(x[:, 0], 2, ceil_mode=True)
    return small, flat, functional.max_pool2d(small, 2), functional.max_pool3d(x[:, None], 2, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maximum_of_a_window_of_minus_infinity_is_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    """ONNX Runtime returns the smallest finite number. A window that contains that number keeps it."""
    x = torch.randn(2, 3, 9, 7, dtype=dtype)
    low = torch.full((4, 3, 9, 7), torch.finfo(dtype).min, dtype=dtype)
    low = low.masked_fill(torch.rand(low.shape) < 0.5, -torch.inf)
    nothing = torch.full_like(low, -torch.inf)
    nothing[0] = low[0]
    files.assert_onnx(Program(_windows), {"x": x}, _BATCH, tmp_path, {"x": x}, {"x": low}, {"x": nothing})


def _layers(m: Any, x: torch.Tensor) -> Any:
    y = m.norm(m.conv(x))
    z = torch.cat([functional.silu(y), functional.leaky_relu(y)], 1)
    return functional.max_pool2d(y.relu(), 3, 2, 1), functional.max_pool2d(functional.max_pool2d(z, 2), 2)


@pytest.mark.slow
def test_max_pool_after_layers_is_a_single_node(tmp_path: Path) -> None:
    model = Program(_layers, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)).eval()
    subject = files.prepare(model, {"x": torch.randn(2, 3, 9, 7)}, _BATCH)
    files.save_onnx(subject, tmp_path / "model.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert operators.count("MaxPool") == 3
    assert "Where" not in operators
