"""Functions of ``math`` that a model applies to sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from optexport.errors import FixedSizeError, UntraceableError
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from tests.exporters import files

DYNAMIC: Any = {"x": {0: "batch", 1: Dim("time", 2, 64)}}


class Scaled(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def logarithms(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    return x * math.log(n) + math.log2(n) - math.log10(n + 1) / math.log(n, 7) + math.log1p(n / 3)


def others(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    return torch.softmax(x / sqrt(n) * exp(-n / 10), 1) + math.cos(n) * math.sin(n) + math.tanh(n / 50) + math.log(n)


@pytest.mark.parametrize("function", [logarithms, others])
def test_functions_of_sizes_are_computed_for_every_size(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    functions = math.log, exp
    model = Scaled(function).eval()
    traced = trace(model, {"x": torch.randn(2, 10, 4)}, DYNAMIC)
    assert not traced.fixed
    assert (math.log, exp) == functions
    for time in (2, 9, 10, 36, 64):
        x = torch.randn(3, time, 4)
        torch.testing.assert_close(traced.graph_module(x), model(x))


@pytest.mark.slow
def test_functions_of_sizes_are_written(tmp_path: Path) -> None:
    others_ = ({"x": torch.randn(3, time, 4)} for time in (2, 9, 36))
    files.assert_onnx(Scaled(logarithms), {"x": torch.randn(2, 10, 4)}, DYNAMIC, tmp_path, *others_)


@pytest.mark.slow
def test_what_cannot_be_computed_is_refused_with_another_way_to_write_it() -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, scale=math.log(x.shape[1]))

    with pytest.raises(FixedSizeError, match=r"because of .*scale=math.log") as caught:
        trace(Scaled(attention).eval(), {"x": torch.randn(2, 10, 4)}, DYNAMIC)
    assert "torch.full((), size, dtype=torch.float64).log() for math.log(size), and" in str(caught.value.hint)
    with pytest.raises(UntraceableError, match=r"with a size of an input in NumPy, at .*np.sqrt") as untraceable:
        trace(Scaled(lambda x: x / np.sqrt(x.shape[1])).eval(), {"x": torch.randn(2, 10, 4)}, DYNAMIC)
    assert untraceable.value.hint == "Use functions of math or torch for sizes."
