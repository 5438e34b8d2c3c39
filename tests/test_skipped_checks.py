"""Checks of values, which raise or do nothing: a trace goes on behind them."""

import pytest
import torch
from torch import nn

from optexport import trace
from optexport.errors import TraceError


class Checks(nn.Module):
    """Raises where its inputs do not fit together, in several ways of saying so."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x is not None and x[mask].numel() != 2 * mask.sum():
            raise ValueError("the mask does not fit")
        if not (x.sum() > -1e9):
            raise ValueError("too small")
        assert x.max() < 1e9, "too large"
        assert not torch.isnan(x).any()
        return x * mask[:, None]


class Branches(nn.Module):
    """Raises beside a condition on which something else hangs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("negative numbers alone")
        else:  # noqa: RET506
            x = x * 2
        return x


class Mixed(nn.Module):
    """A condition of which nobody can say what makes it pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0 and not x.max() > 1e9:
            raise ValueError("odd numbers")
        return x * 2


def test_a_trace_goes_on_behind_checks_of_values():
    model = Checks()
    example = {"x": torch.randn(5, 2), "mask": torch.tensor([True, False, True, True, False])}
    traced = trace.trace(model, example)
    x, mask = torch.randn(7, 2), torch.rand(7) > 0.5
    assert torch.equal(traced.graph_module(x, mask), model(x, mask))


@pytest.mark.parametrize("model", [Branches(), Mixed()])
def test_a_condition_that_decides_something_else_is_no_check(model):
    with pytest.raises(TraceError, match="could not trace it, and stopped at test_skipped_checks.py"):
        trace.trace(model, {"x": -torch.rand(5, 2)})
