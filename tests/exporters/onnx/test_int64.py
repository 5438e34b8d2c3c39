"""Tests of int64 operators in ONNX files, with numbers beyond 32 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from optexport.runtime import runners
from optexport.signature.signature import flatten_outputs
from tests._helpers.graphs import Program
from tests.exporters import files

# The last are time stamps in milliseconds within 49 days (2**32 milliseconds).
_NUMBERS = [
    *(torch.randint(-limit, limit, (8, 6), generator=torch.Generator().manual_seed(0)) for limit in (6, 2**33, 2**62)),
    1_699_999_199_000 + torch.randint(0, 2**32, (8, 6), generator=torch.Generator().manual_seed(1)),
]


def _pairs(m: nn.Module, x: torch.Tensor) -> Any:
    y = x.flip(0)
    clamped = [x.clamp(min=0), x.clamp(max=10), x.clamp(-5, 5), x.clamp(min=y), x.clamp(y, y + 3)]
    return torch.maximum(x, y), torch.minimum(x, y), clamped, x.sign(), x.sgn(), functional.relu(x), functional.relu6(x)


def _axes(m: nn.Module, x: torch.Tensor) -> Any:
    maxima = [x.amax(0), x.amax(1), x.amax((0, -1)), x.amax((0, 1), keepdim=True), x.max(), x.max(1)]
    return maxima, x.amin(-1), x.min(), x.min(0, keepdim=True), torch.aminmax(x, dim=1), x.cummax(0), x.cummin(1)


def _divisions(m: nn.Module, x: torch.Tensor) -> Any:
    return torch.fmod(x, 7), torch.fmod(x, x.flip(0) | 1), x % 7, x.floor(), x.ceil(), x.trunc(), x.round()


def _check(program: Any, path: Path) -> set[str]:
    """Asserts that a file gives equal numbers, optimized or not. Returns its operators."""
    subject = files.prepare(Program(program), {"x": _NUMBERS[0][:4]}, {"x": {0: "rows"}})
    files.save_onnx(subject, path)
    for optimized in (False, True):
        run = runners.open_onnx(path, subject.signature.output_names, optimized=optimized)
        for x in _NUMBERS:
            for result, expected in zip(
                run({"x": x}).values(), flatten_outputs(program(None, x)).values(), strict=True
            ):
                assert torch.equal(result, expected)
    return {node.op_type for node in onnx.load(path).graph.node}


def test_maximum_and_minimum_of_two_are_exact(tmp_path: Path) -> None:
    """ONNX Runtime returns 5 as the maximum of 3,000,000,000 and 5."""
    assert not _check(_pairs, tmp_path / "model.onnx") & {"Max", "Min", "Clip", "Sign", "Relu"}


@pytest.mark.slow
def test_maximum_and_minimum_along_axes_are_exact(tmp_path: Path) -> None:
    """ONNX Runtime returns the earlier of two time stamps as the maximum."""
    assert not _check(_axes, tmp_path / "model.onnx") & {"Max", "Min", "ReduceMax", "ReduceMin"}


@pytest.mark.slow
def test_remainders_are_exact_and_rounding_keeps_integers(tmp_path: Path) -> None:
    _check(_divisions, tmp_path / "model.onnx")


@pytest.mark.slow
def test_stable_argsort_keeps_the_order_of_ties(tmp_path: Path) -> None:
    """``torch.onnx`` has no translation of a stable argsort."""

    def orders(m: nn.Module, x: torch.Tensor) -> Any:
        tied = x % 3
        return torch.argsort(tied, dim=1, stable=True), torch.argsort(tied, dim=0, descending=True, stable=True)

    _check(orders, tmp_path / "model.onnx")


@pytest.mark.slow
def test_other_dtypes_keep_their_operators(tmp_path: Path) -> None:
    def body(m: nn.Module, x: torch.Tensor) -> Any:
        y = x.flip(0)
        return torch.maximum(x, y), torch.minimum(x, y), x.clamp(-1, 1), x.sign(), functional.relu(x), x.amax(1)

    subject = files.prepare(Program(body), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}})
    files.save_onnx(subject, tmp_path / "model.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert {"Max", "Min", "Sign", "Relu", "ReduceMax"} <= operators
    files.assert_outputs(subject, tmp_path / "model.onnx", {"x": torch.randn(7, 5)})
