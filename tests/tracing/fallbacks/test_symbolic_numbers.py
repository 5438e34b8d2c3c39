"""Models may read numbers from tensors with int() and float()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexport.tracing.trace import trace
from tests._helpers.exports import quick, run

INDEX = torch.tensor([1, 2, 3])
OTHER_INDEX = torch.tensor([1, 7, 3, 0, 2])


class Checks(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if int(index.max()) >= 10:
            raise ValueError("an index is too large")
        return x * 2 + index[:, None]


class ChecksFloats(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if float(x.abs().max()) > 100.0:
            raise ValueError("a value is too large")
        return x * 2 + index[:, None]


class Heuristic(nn.Module):
    """Chooses an algorithm by a number; both give the same."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        count = int(torch.bincount(index, minlength=8).max())
        is_large = bool(torch.tensor([count, x.shape[1]]).float().matmul(torch.ones(2)) > 6)
        return torch.stack([row * 2 for row in x.unbind(1)], 1) if is_large else x * 2


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        number = int(index.max())
        assert isinstance(3, int)
        assert not isinstance(3.0, int)
        if number > 100:
            x = x / number
        return x * number + float(index.sum()) + int("3") + int(x.shape[1])


@pytest.mark.parametrize("cls", [Checks, ChecksFloats, Heuristic, Scaled])
def test_number_that_a_model_reads_is_traced(cls: type[nn.Module]) -> None:
    dynamic = {"x": {0: "rows"}, "index": {0: "rows"}}
    traced = trace(cls(), {"x": torch.randn(3, 4), "index": INDEX}, dynamic, {"index": []})
    x = torch.randn(5, 4)
    assert torch.equal(traced.graph_module(x, OTHER_INDEX), cls()(x, OTHER_INDEX))
    assert "int" not in globals()
    assert bool(traced.skipped_checks) == (cls in (Checks, ChecksFloats))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Checks, Heuristic, Scaled])
def test_files_of_a_model_that_reads_numbers(tmp_path, cls: type[nn.Module]) -> None:
    dynamic = {"x": {0: "rows"}, "index": {0: "rows"}}
    formats = ["onnx", "torchscript"]
    result = quick(
        cls(), {"x": torch.randn(3, 4), "index": INDEX}, tmp_path / "bundle", formats=formats, dynamic=dynamic
    )
    x = torch.randn(5, 4)
    for output in run(result, x=x, index=OTHER_INDEX).values():
        torch.testing.assert_close(output, cls()(x, OTHER_INDEX))
