"""Sums and means over many positions are about as precise in ONNX Runtime as in torch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import optexport
from optexport.exporters import targets
from tests.exporters import files


class Reductions(nn.Module):
    """All forms of means and sums."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means = (x.mean(), x.mean(-1), x.mean((1, -1)), x.mean((2, 1), keepdim=True), x.mean((0, 1, 2, 3)))
        sums = (x.sum(), x.sum((1, 3)), x.sum((-1, 0), keepdim=True), (x > 0).sum((1, 2, 3)))
        return *means, *sums, x.sum((1, 2), dtype=torch.float64), torch.sum(x, 1)


@pytest.mark.parametrize("size", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_reductions_of_other_sizes(tmp_path: Path, size: int) -> None:
    dynamic = {"x": {0: "batch", 2: "height", 3: "width"}}
    other = ({"x": torch.randn(shape)} for shape in ((1, 5, 2, 9), (4, 5, 70, 40)))
    files.assert_onnx(Reductions(), {"x": torch.randn(2, 5, size, size)}, dynamic, tmp_path, *other)


class GlobalMean(nn.Module):
    """Mean over all positions and channels of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((1, 2, 3))


@pytest.mark.slow
def test_global_mean_of_a_large_image_passes(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    result = optexport.export(GlobalMean().eval(), {"x": x}, tmp_path / "out", formats="onnx")
    reductions = [node for node in onnx.load(result.files["onnx"]).graph.node if node.op_type == "ReduceMean"]
    assert len(reductions) == 2
    *_, (_, run) = targets.open_file(result.files["onnx"], "onnx", ["output"])
    exact = GlobalMean().double()(x.double())
    torch.testing.assert_close(run({"x": x})["output"].double(), exact, atol=1.5e-8, rtol=0)  # 4e-8 in one step
