"""Assertions that only operators cause are removed, also if there are too many to trace a branch for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optexport.errors import TraceError
from optexport.signature.signature import Dim, Dynamic
from optexport.tracing.shapes import path_probe
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program

DYNAMIC: Dynamic = {"x": {0: "batch", 2: Dim("height", 2, 64), 3: Dim("width", 2, 64)}}


def exchanged(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads an image's pixels as its channels; reshape asks whether the number of pixels is a multiple of 6."""
    batch, channels, height, width = x.shape
    rows = m.layer(x).flatten(2).transpose(1, 2).contiguous()
    image: torch.Tensor = rows.reshape(batch, channels, height, width)
    return image


def branching(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on what reshape has asked before."""
    y, pixels = exchanged(m, x), x.shape[2] * x.shape[3]
    return y * 2 if pixels % 6 else y


def model(function: Any) -> Program:
    return Program(function, layer=nn.Conv2d(6, 6, 3, padding=1)).eval()


@pytest.mark.slow
def test_condition_that_only_an_operator_asks_for_needs_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_probe, "_MAX_BRANCHES", 0)
    exchange = model(exchanged)
    traced = trace(exchange, {"x": torch.randn(2, 6, 8, 9)}, DYNAMIC)
    for shape in ((2, 6, 8, 9), (1, 6, 5, 7), (3, 6, 2, 3), (2, 6, 64, 2), (4, 6, 6, 6), (2, 6, 11, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(traced.graph_module(x), exchange(x))


@pytest.mark.slow
def test_branch_of_a_model_on_a_condition_of_an_operator_is_found() -> None:
    with pytest.raises(TraceError, match="Mod"):
        trace(model(branching), {"x": torch.randn(2, 6, 8, 9)}, DYNAMIC)
