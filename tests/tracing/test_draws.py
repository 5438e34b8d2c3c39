"""Random numbers: a model whose outputs hang on some is refused, however seldom they show; others are let through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optexport.errors import TraceError
from optexport.tracing import draws
from optexport.tracing.trace import trace
from tests.transformations.programs import Program

Function = Callable[[nn.Module, torch.Tensor], object]


def check(function: Function, *kept: str) -> None:
    traced = trace(Program(function).eval(), {"x": torch.randn(3, 6)})
    names = traced.signature.output_names
    draws.check_none(traced.graph_module.graph, names, kept or names)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.multinomial(torch.softmax(x * 1e3, -1), 1),
        lambda m, x: F.dropout(x, 1e-6, training=True),
        lambda m, x: x * (torch.rand(()) > 1e-6),
        lambda m, x: x + torch.zeros(6).bernoulli_(1e-6),
        lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=1e-6),
    ],
)
def test_outputs_that_depend_on_random_numbers_are_refused_with_the_line(function: Function) -> None:
    with pytest.raises(
        TraceError, match=r"draws random numbers that its outputs depend on, at programs.py:\d+: return self"
    ):
        check(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.dropout(x, 0.5, training=False),
        lambda m, x: F.dropout(x, 0.0, training=True),
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
        lambda m, x: (torch.rand(()), x * 2)[1],
    ],
)
def test_what_draws_nothing_or_has_no_say_is_let_through(function: Function) -> None:
    check(function)


def test_outputs_that_are_left_out_may_be_random() -> None:
    check(lambda m, x: {"mean": x * 2, "sample": torch.randn_like(x)}, "mean")
