"""Bytes of tensors with any memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexport import Dim
from optexport._utils.tensors import bytes_of
from tests._helpers.exports import quick

KEPT = torch.arange(12.0).reshape(4, 3)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "tensor",
    [
        KEPT[:1, 1],
        KEPT[:0, 1],
        KEPT[:, 1],
        KEPT.t(),
        KEPT[2, 1],
        KEPT[:1, :1],
        KEPT[:, ::2].bool(),
        KEPT.cfloat()[:1, 1],
    ],
    ids=["one element", "none", "a column", "transposed", "no dimension", "one of two", "bool", "complex"],
)
def test_bytes_are_in_row_major_order(tensor: torch.Tensor) -> None:
    assert bytes_of(tensor).numpy().tobytes() == tensor.contiguous().numpy().tobytes()


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, 0]


@pytest.mark.slow
def test_model_with_a_column_as_output_is_exported(tmp_path: object) -> None:
    """At batch 1 the column has one element and a stride, which crashed the run."""
    assert quick(Score().eval(), {"x": torch.randn(3, 4)}, tmp_path, dynamic={"x": {0: Dim("batch", 1, 8)}}).passed
