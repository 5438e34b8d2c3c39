"""Tests of the pass that splits linears whose result is only cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from tests.exporters.onnx.test_passes import in_onnx
from tests.exporters.pass_files import program, write_both


def thirds(y: torch.Tensor) -> list[torch.Tensor]:
    return [y[..., :2], y[..., 2:5], y[..., 5:]]


@pytest.mark.parametrize("bias", [True, False])
def test_merged_linear_is_written_as_its_parts(bias: bool, tmp_path: Path) -> None:
    def combine(m: Any, x: torch.Tensor) -> Any:
        a, b, c = thirds(m.a(x))
        return a.sin(), b.cos(), c.exp()

    plain, split = in_onnx(program(combine, a=nn.Linear(4, 9, bias=bias)), "split-linears", tmp_path)
    assert (plain["MatMul"], plain["Slice"]) == (1, 3)
    assert (split["MatMul"], split["Slice"], split["Add"]) == (3, 0, 3 * bias)


def test_result_of_a_linear_is_split_evenly(tmp_path: Path) -> None:
    subject = program(lambda m, x: [y.sin() for y in m.a(x).chunk(3, dim=-1)], a=nn.Linear(4, 9))
    plain, split = in_onnx(subject, "split-linears", tmp_path)
    assert (plain["MatMul"], plain["Split"]) == (1, 1)
    assert (split["MatMul"], split["Split"], split["Slice"]) == (3, 0, 0)


def test_calls_that_share_a_weight_share_its_parts(tmp_path: Path) -> None:
    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            a, b = m.a(x).split(4, dim=-1)
            x = a.sin() + b
        return x

    subject = program(twice, a=nn.Linear(4, 8))
    _, split = in_onnx(subject, "split-linears", tmp_path)
    assert split["MatMul"] == 4
    plain_path, path = write_both(subject, "onnx", "split-linears", tmp_path)
    sizes = [sum(t.ByteSize() for t in onnx.load(file).graph.initializer) for file in (plain_path, path)]
    assert sizes[1] < 1.5 * sizes[0]


def test_weight_used_both_ways_has_other_parts_in_each(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return [y.sin() for weight in (m.a.weight, m.a.weight.T) for y in (x @ weight).split(2, dim=-1)]

    _, split = in_onnx(program(forward, a=nn.Linear(4, 4)), "split-linears", tmp_path)
    assert split["MatMul"] == 4


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (y := m.a(x), y[..., :2].sin(), y[..., 2:].cos()),  # the whole result is an output
        lambda m, x: (y := m.a(x), y[..., :2].sin() + y.sum())[1],  # another reader needs all columns
        lambda m, x: m.a(x)[..., :2].sin(),  # a single part
        lambda m, x: (y := m.a(x), y[..., ::2].sin(), y[..., 1::2].cos())[1:],  # every second column
        lambda m, x: (y := m.a(x), y[:, :1].sin(), y[:, 1:].cos())[1:],  # another axis
    ],
)
def test_other_results_stay_whole(forward: Callable[..., Any], tmp_path: Path) -> None:
    plain, split = in_onnx(program(forward, a=nn.Linear(4, 8)), "split-linears", tmp_path)
    assert split == plain


def test_product_of_two_inputs_stays_whole(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = x @ x.transpose(-1, -2) @ x
        return y[..., :2].sin(), y[..., 2:].cos()

    plain, split = in_onnx(program(forward), "split-linears", tmp_path)
    assert split == plain
