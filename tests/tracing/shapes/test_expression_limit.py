"""Sizes computed from unbounded sizes: fixed if undeclared, refused if declared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexport.errors import TraceError
from optexport.signature.signature import Dim
from optexport.tracing.shapes import expression_limit
from optexport.tracing.trace import trace

EXAMPLE = {"x": torch.zeros(3, 2, 40)}


class Windows(nn.Module):
    """Pads to whole windows, mixes them, and cuts the padding except for an end that the next layer cuts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for window in (3, 5, 7, 11, 13, 17, 19, 23):
            length = x.shape[-1]
            x = nn.functional.pad(x, (0, (window - length % window) % window))
            x = x.reshape(x.shape[0], x.shape[1], -1, window).flip(-1).flatten(-2)[..., : length + length // window]
        return x


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expression_limit, "MAX_SECONDS", 0.0)


@pytest.mark.nightly
def test_undeclared_axes_except_the_first_are_fixed() -> None:
    model = Windows().eval()
    traced = trace(model, EXAMPLE)
    assert list(traced.signature.dims) == ["batch"]
    assert [axis.partition(";")[0] for axis in traced.fixed] == ["x[1] = 2", "x[2] = 40"]
    assert all("; if that were dynamic, a size is an expression of other sizes with " in axis for axis in traced.fixed)
    batch = torch.randn(5, 2, 40)
    assert torch.equal(traced.graph_module(batch), model(batch))


@pytest.mark.slow
def test_declared_axis_is_refused_with_the_line_of_the_model() -> None:
    dynamic = {"x": {0: "batch", 2: Dim("length", 30, 60)}}
    with pytest.raises(
        TraceError, match=r"a size is an expression of other sizes with \d+ operations, at test_expression_limit"
    ) as caught:
        trace(Windows().eval(), EXAMPLE, dynamic)
    assert caught.value.location == "Windows"
    assert caught.value.hint is not None
    assert "Keep only the batch in inputs.dynamic" in caught.value.hint
