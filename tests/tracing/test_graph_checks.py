"""A model is refused if its outputs depend on random numbers, even rarely, or if no file can store it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optexport.errors import TraceError
from optexport.tracing.graph_checks import check_deterministic, check_writable
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program

Function = Callable[[nn.Module, torch.Tensor], object]


def check(function: Function, *outputs: str) -> None:
    traced = trace(Program(function).eval(), {"x": torch.randn(3, 6)})
    names = traced.signature.output_names
    check_deterministic(traced.graph_module, names, outputs or names)


def written_to_a_view(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    drawn = torch.zeros(4, 6)
    drawn[0].bernoulli_(1e-6)
    return x + drawn.sum(0)


def on_one_way(_: nn.Module, x: torch.Tensor) -> object:
    return torch.cond(x.sum() > 0, lambda x: x + torch.bernoulli(x.sigmoid()), lambda x: x * 2, (x,))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "function",
    [
        written_to_a_view,
        lambda m, x: torch.multinomial(torch.softmax(x * 1e3, -1), 1),
        lambda m, x: F.dropout(x, 1e-6, training=True),
        lambda m, x: x * (torch.rand(()) > 1e-6),
        lambda m, x: x + torch.zeros(6).bernoulli_(1e-6),
        lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=1e-6),
    ],
)
def test_random_outputs_are_refused_with_the_line(function: Function) -> None:
    with pytest.raises(
        TraceError,
        match=r"outputs depend on random numbers, which \S+ draws, at (graphs|test_graph_checks).py:\d+: \w+",
    ):
        check(function)


@pytest.mark.slow
def test_random_numbers_in_a_single_branch_are_found() -> None:
    with pytest.raises(TraceError, match="outputs depend on random numbers, which cond draws"):
        check(on_one_way)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.dropout(x, 0.5, training=False),
        lambda m, x: F.dropout(x, 0.0, training=True),
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
        lambda m, x: (torch.rand(()), x * 2)[1],
    ],
)
def test_model_without_random_outputs_is_accepted(function: Function) -> None:
    check(function)


def test_outputs_that_are_left_out_may_be_random() -> None:
    check(lambda m, x: {"mean": x * 2, "sample": torch.randn_like(x)}, "mean")


def test_choice_among_sizes_that_files_cannot_express_is_refused() -> None:
    model = Program(lambda m, x: x[:, torch.sym_ite(x.shape[0] == 1, 1, 0) :]).eval()
    traced = trace(model, {"x": torch.randn(3, 5)})
    with pytest.raises(TraceError, match="torch.sym_ite"):
        check_writable(traced.graph_module.graph)
