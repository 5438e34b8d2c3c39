"""Instance and group norms in ONNX Runtime are as precise as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.runtime import runners
from tests.exporters import files


class Norms(nn.Module):
    """Instance and group norms with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.instance = nn.InstanceNorm2d(6, affine=True)
        self.running = nn.InstanceNorm2d(6, track_running_stats=True)
        self.group = nn.GroupNorm(3, 6)
        for norm in (self.instance, self.group):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vector = nn.functional.group_norm(x.mean((2, 3)), 2)
        return self.instance(x), self.running(x), self.group(x), nn.functional.instance_norm(x[:, :, 0]), vector


@pytest.mark.slow
def test_norms_of_other_sizes(tmp_path: Path) -> None:
    dynamic = {"x": {0: "batch", 2: "height", 3: "width"}}
    other = ({"x": torch.randn(shape) + 3} for shape in ((1, 6, 3, 9), (4, 6, 2, 2)))
    files.assert_onnx(Norms(), {"x": torch.randn(2, 6, 4, 5)}, dynamic, tmp_path, *other)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(4), nn.GroupNorm(2, 4)], ids=["instance", "group"])
def test_norm_of_equal_values_is_zero(norm: nn.Module, tmp_path: Path) -> None:
    """ONNX Runtime's InstanceNormalization gives 0.003 to 0.03 here."""
    example, dynamic = {"input": torch.randn(2, 4, 8, 8)}, {"input": {2: "height", 3: "width"}}
    subject, path = files.prepare(norm, example, dynamic), tmp_path / "model.onnx"
    files.save_onnx(subject, path)
    run = runners.open_onnx(path, subject.signature.output_names, optimized=True)
    (result,) = run({"input": torch.full((2, 4, 224, 224), 0.37)}).values()
    assert result.abs().max() < 1e-4
