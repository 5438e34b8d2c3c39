"""Models that branch on values and convert tensors to Python's numbers."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.tracing.fallbacks.number_conversions import tracing_conversions
from tests.exporters import files


class Converting(nn.Module):
    """Calls a function of this file."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def limits(x: torch.Tensor) -> Any:
    return x + 1 if float(x.max()) <= 0.3 else x


def counts(x: torch.Tensor) -> Any:
    count = int((x > 0).sum())
    if count == 0:
        return torch.zeros_like(x), x > count, torch.tensor(count)
    return x / count, x > count, torch.tensor(count)


def takes_the_root(x: torch.Tensor) -> Any:
    v = x.sum().item()
    scale = math.sqrt(v) if v > 0 else 1.0
    return x / scale


def finds_special_numbers(x: torch.Tensor) -> Any:
    v = float(x.sum())
    if math.isnan(v):
        return torch.nan_to_num(x)
    return x * 2 if math.isfinite(v) else x.clamp(-1, 1)


def bounds_a_share(x: torch.Tensor) -> Any:
    return x * min(max(float((x > 0).float().mean()), 0.25), 0.75) + int("3") * float("0.5")


def picks_a_column(x: torch.Tensor) -> Any:
    column = int(x[0].argmax())
    return x[:, column] if column > 1 else x[:, 0] * 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "function",
    [limits, counts, finds_special_numbers, takes_the_root, bounds_a_share, picks_a_column],
    ids=lambda function: function.__name__,
)
def test_converted_numbers_choose_a_way(function: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    special = [torch.full((2, 4), value) for value in (0.3, 0.0, torch.nan, torch.inf, -torch.inf)]
    inputs = [{"x": x} for x in (*special, torch.randn(5, 4) + 3, torch.randn(2, 4) - 3)]
    files.assert_onnx(Converting(function).eval(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}}, tmp_path, *inputs)


def test_types_are_the_same_within_and_after_the_block() -> None:
    with tracing_conversions(Converting(limits)):
        assert int is not builtins.int
        assert isinstance(3, int)
        assert not isinstance(3.0, int)
        assert int("12", 8) == 10
        assert float("inf") == math.inf
        assert int.from_bytes(b"\x02") == 2
        assert math.isnan(math.nan)
    assert int is builtins.int
    assert math.isnan.__module__ == "math"
