"""Branches at a size of 1, which torch.export does not use as an example and asserts nothing about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optexport.errors import ParityError
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from tests._helpers.exports import quick
from tests._helpers.graphs import Program

Where = Callable[[torch.Tensor], Any]
DYNAMIC = {"x": {0: Dim("batch", 1, 16), 1: Dim("rows", 1, 40), 2: Dim("columns", 1, 40)}}


def doubled_where(condition: Where) -> Program:
    return Program(lambda m, x: x * (2 if condition(x) else 3)).eval()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "condition",
    [
        lambda x: x.shape[1] == 1 and x.shape[2] > 20,
        lambda x: x.shape[2] % 2 == 0 and x.shape[1] == 1 and x.shape[0] > 9,
        lambda x: x.shape[1] < 2 and x.shape[2] % 6 == 0,
        lambda x: x.shape[0] == 1 and x.shape[2] == 1 and x.shape[1] > 20,
        lambda x: not (x.shape[1] - 1) and x.shape[2] > 20,
        lambda x: min(x.shape[1], 2) * x.shape[2] == 17,
        lambda x: x.squeeze(1).dim() == 2 and x.shape[2] > 20,
        lambda x: x.squeeze().dim() == 2 and x.shape[2] > 20,
    ],
    ids=["and", "behind another", "less than 2", "two of them", "truth", "the smaller", "an axis gone", "axes gone"],
)
def test_question_about_other_sizes_after_size_one_is_in_doubt(condition: Where) -> None:
    traced = trace(doubled_where(condition), {"x": torch.randn(3, 7, 5)}, DYNAMIC)
    usual = {"batch": 3, "rows": 7, "columns": 5}
    tried = [torch.zeros(list({**usual, **sizes}.values())) for sizes in traced.suspect_sizes]
    assert any(condition(x) for x in tried)


def test_sizes_without_a_branch_need_no_second_trace() -> None:
    traced = trace(Program(lambda m, x: x.softmax(-1) @ x.mT).eval(), {"x": torch.randn(3, 7, 5)}, DYNAMIC)
    assert traced.suspect_sizes == ()


class Attends(torch.nn.Module):
    """A single new token attends to the last 16 only."""

    def forward(self, query: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([past, query], 1)
        if query.shape[1] == 1 and past.shape[1] >= 16:
            keys = keys[:, -16:]
        return (query @ keys.mT).softmax(-1) @ keys


@pytest.mark.slow
def test_decoding_step_that_cuts_its_cache_is_refused(tmp_path: Path) -> None:
    """It passed verification, and every file was wrong from sixteen tokens on."""
    batch, new, old = Dim("batch", 1, 8), Dim("new", 1, 16), Dim("old", 1, 64)
    with pytest.raises(ParityError, match="new 1, old 16"):
        quick(
            Attends(),
            {"query": torch.randn(2, 5, 4), "past": torch.randn(2, 9, 4)},
            tmp_path / "bundle",
            dynamic={"query": {0: batch, 1: new}, "past": {0: batch, 1: old}},
        )


def test_condition_behind_a_branch_on_values_is_in_doubt_at_size_one() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 3:
            x = x / 2
        if x.shape[0] == 1 and x.shape[1] >= 8:
            return x * 2
        return x * 3

    dynamic = {"x": {0: Dim("new", 1, 16), 1: Dim("old", 1, 64)}}
    traced = trace(Program(forward).eval(), {"x": torch.randn(3, 4)}, dynamic)
    assert traced.branches
    assert any(sizes.get("new") == 1 for sizes in traced.suspect_sizes)


def test_condition_of_a_strict_trace_is_in_doubt_at_size_one() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x / len(x) * (2 if x.shape[1] == 1 and x.shape[0] > 20 else 3)

    dynamic = {"x": {0: Dim("rows", 1, 50), 1: Dim("columns", 1, 50)}}
    traced = trace(Program(forward).eval(), {"x": torch.randn(3, 5)}, dynamic)
    assert traced.is_strict
    assert any(sizes.get("columns") == 1 for sizes in traced.suspect_sizes)
