"""Small models to serve, and their exports in the Triton layout, each made once."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optexport import export
from optexport.report.result import Result
from optexport.signature.signature import Dim
from tests._helpers import exports
from tests._helpers.models import randomise

# Removed when the tests end.
_PLACE = tempfile.TemporaryDirectory(prefix="optexport-serving-")


class Rows(nn.Module):
    """Independent rows, in tensors of many dtypes, one of them with only the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 3), nn.Embedding(9, 3)

    def forward(
        self, x: torch.Tensor, flag: torch.Tensor, ids: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> dict[str, torch.Tensor]:
        y = self.linear(x) + self.table(ids)
        whether = y.amax((1, 2)) > 0
        return {"y": y, "a row's": y.mean((1, 2)), 'it is "so"\\': whether & flag, "halves/0": states[0] * states[1]}


class Mixed(nn.Module):
    """The result of each row depends on the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Pairs(nn.Module):
    """Compares every row with every other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.T


class Crossed(nn.Module):
    """Takes two batches of different sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y.mean(0), y + x.mean(0)


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.shape[0]


class Chain(nn.Module):
    """Two layers, wide enough to be lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def rows(size: int = 4, sequence: int = 5) -> dict[str, Any]:
    """Returns inputs of `Rows`."""
    generator = torch.Generator().manual_seed(size)
    halves = tuple(torch.randn(size, 2, generator=generator).half() for _ in range(2))
    ids = torch.randint(9, (size, sequence), generator=generator)
    x = torch.randn(size, sequence, 4, generator=generator)
    return {"x": x, "flag": torch.arange(size) % 2 == 0, "ids": ids, "states": halves}


_BATCH = Dim("batch", 1, 16)
_TEXT = {0: _BATCH, 1: Dim("sequence", 2, 32)}
ROWS_AXES = {"x": _TEXT, "ids": _TEXT, "flag": {0: _BATCH}, "states.0": {0: _BATCH}, "states.1": {0: _BATCH}}


def laid_out(name: str, model: nn.Module, inputs: Any, **options: Any) -> Result:
    """Exports a model in the Triton layout, with only the named rules."""
    options = {"transformations": [], "layout": "triton", **options}
    return export(randomise(model).eval(), inputs, Path(_PLACE.name) / name, **options)


# The models by name. Tests share the exports, so none may change them.
@functools.cache
def served(name: str) -> Result:
    x = torch.linspace(-2, 2, 16).reshape(4, 4)
    match name:
        case "rows":
            return laid_out(name, Rows(), rows(), dynamic=ROWS_AXES)
        case "block":  # returns a scalar, which no backend batches and the PyTorch backend does not return
            return laid_out(name, exports.block(), exports.batch(), dynamic=exports.DYNAMIC, formats=["onnx"])
        case "mixed":
            return laid_out(name, Mixed(), {"x": x}, dynamic=exports.BATCH, formats=["onnx"])
        case "pairs":
            return laid_out(name, Pairs(), {"x": x}, dynamic=exports.BATCH)
        case "fixed":
            options = {"formats": ["torchscript"], "allow_fixed_shape": True}
            with exports.without_scripting():
                return laid_out(name, Sine(), {"x": x}, dynamic=exports.BATCH, **options)
        case "two batches":
            axes = {"x": {0: "a"}, "y": {0: "b"}}
            return laid_out(name, Crossed(), {"x": x, "y": x[:3]}, dynamic=axes, formats=["onnx"])
        case _:  # a precision
            inputs = {"x": torch.randn(8, 32, generator=torch.Generator().manual_seed(0))}
            lowered = {"precision": {"onnx": name}, "metrics": {"cosine": 0.9}}
            return laid_out(name, Chain(), inputs, dynamic=exports.BATCH, formats=["onnx"], **lowered)
