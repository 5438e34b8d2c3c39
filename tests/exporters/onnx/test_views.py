"""Writes into views in ONNX files: the tensor that is viewed changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport import Dim
from optexport.exporters.onnx.exporter import _writes_into_view
from tests._helpers.graphs import Program
from tests.exporters import files

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
WRITES: dict[str, Write] = {
    "a number where a mask is true": lambda y, x, i: y.__setitem__((x[:, 0] > 0, 0), 1.5),
    "values in one row": lambda y, x, i: y.__setitem__((0, i), x[:2, 1]),
    "values where a mask is true": lambda y, x, i: y.__setitem__((x[:, 0] > 0, 1), x[x[:, 0] > 0, 1]),
    "columns of a slice": lambda y, x, i: y.__setitem__((slice(1, None), i), 0.0),
    "a transposed tensor": lambda y, x, i: y.T.__setitem__(i, 1.0),
    "a method of a slice": lambda y, x, i: y[:3, 1:].triu_(),
    "a row for all": lambda y, x, i: y[:, 0].copy_(x[0, 0]),
    "a flat view": lambda y, x, i: y.view(-1).__setitem__(i, 4.0),
}


class Writes(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 1
        self._write(y, x, i)
        return y


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WRITES)
def test_write_into_a_view_reaches_the_base(name: str, tmp_path: Path) -> None:
    """The file returned the tensor without the write."""
    index = torch.tensor([2, 0])
    inputs = {"x": torch.randn(6, 4), "i": index}
    model, dynamic = Writes(WRITES[name]).eval(), {"x": {0: Dim("n", 4, 50)}}
    others = ({"x": torch.randn(n, 4), "i": index} for n in (6, 4, 9))
    files.assert_onnx(model, inputs, dynamic, tmp_path, *others)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.norm(x), inplace=True).add_(1)


def test_write_into_a_whole_result_is_no_write_into_a_view() -> None:
    """Layers would be decomposed, although the usual fixes suffice."""
    program = files.prepare(InPlace().eval(), {"x": torch.randn(3, 4)}, {}).program
    assert not _writes_into_view(program.graph_module)


def test_view_of_attention_in_the_memory_layout_of_its_kernel(tmp_path: Path) -> None:
    """The trace drops ``contiguous()``, because the kernel's result is contiguous after the permutation."""

    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], x.shape[1], 2, 4).permute(0, 2, 1, 3)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return attended.permute(0, 2, 1, 3).contiguous().view(x.shape[0], x.shape[1], -1)

    example, dynamic = {"x": torch.randn(2, 3, 8)}, {"x": {0: "batch", 1: "length"}}
    files.assert_onnx(Program(attend), example, dynamic, tmp_path, {"x": torch.randn(5, 7, 8)})
