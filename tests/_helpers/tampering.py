"""Functions that tamper with exported files: they change one weight or fix one size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from tests._helpers import exports


def tamper_onnx(path: Path) -> None:
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] += np.float32(0.01)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, path)


def tamper_torchscript(path: Path) -> None:
    module = torch.jit.load(path)
    with torch.no_grad():
        next(parameter for parameter in module.parameters() if parameter.dim() > 1)[0, 0] += 0.01
    module.save(path)


def tamper_pt2(path: Path) -> None:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data/weights/weight_0"):
            return content
        values = np.frombuffer(content, np.float32).copy()
        values[0] += 0.01
        return values.tobytes()

    exports.rezip(path, change)


def bake_torchscript(path: Path) -> None:
    """Replaces a script by a trace that is correct at one sequence length only."""

    class Baked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = exports.block()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            size = int(mask.shape[1])
            outputs = self.block(x, mask)
            return outputs["hidden"] * torch.ones(size, 1), outputs["longest"]

    example = dict(zip(("x", "mask"), (torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.int64)), strict=True))
    torch.jit.trace(Baked(), example_kwarg_inputs=example, check_trace=False).save(path)
