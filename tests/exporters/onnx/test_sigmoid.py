"""Tests of the precision of sigmoids in ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from optexport.runtime import runners
from tests._helpers.graphs import Program
from tests.exporters import files


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimized", [False, True])
def test_a_small_sigmoid_has_all_its_digits(tmp_path: Path, optimized: bool) -> None:
    """The operator of ONNX Runtime is wrong in the third digit at -10, and returns 0 below -18."""
    subject = files.prepare(Program(lambda m, x: x.sigmoid()), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}})
    files.save_onnx(subject, tmp_path / "model.onnx")
    x = torch.cat([torch.linspace(-80, 80, 5 * 4001), torch.tensor([-torch.inf, -200, 200, torch.inf, torch.nan])])
    run = runners.open_onnx(tmp_path / "model.onnx", subject.signature.output_names, optimized=optimized)
    (result,) = run({"x": x.reshape(-1, 5)}).values()
    torch.testing.assert_close(result.flatten(), x.double().sigmoid().float(), rtol=5e-7, atol=1e-37, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (x.sigmoid() * 2.0).log(),
        lambda m, x: (x.sigmoid() * (x + 1).sigmoid()).log(),
        lambda m, x: x.sigmoid() * (-x).exp(),
        lambda m, x: (x.sigmoid() * (x > -20)) / (x.sigmoid() * (x > -20)).sum(-1, keepdim=True),
    ],
    ids=["log of a product", "log of two", "times a large number", "normalised"],
)
def test_product_with_a_small_sigmoid_has_all_its_digits(body: Any, tmp_path: Path) -> None:
    """Such products were treated as gates, and results were infinite or wrong by one part in 12."""
    subject = files.prepare(Program(body), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}})
    files.save_onnx(subject, tmp_path / "model.onnx")
    x = torch.linspace(-18, 18, 4005).reshape(-1, 5)
    (result,) = runners.open_onnx(tmp_path / "model.onnx", subject.signature.output_names, optimized=True)(
        {"x": x}
    ).values()
    torch.testing.assert_close(result, body(None, x.double()).float(), rtol=5e-6, atol=5e-7)


def test_sigmoid_of_a_silu_and_of_a_log_has_all_its_digits(tmp_path: Path) -> None:
    """The logarithm of ONNX Runtime's sigmoid is minus infinity below -18."""

    def body(m: nn.Module | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sigmoid()
        return x * y, y.log()

    subject = files.prepare(Program(body), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}})
    files.save_onnx(subject, tmp_path / "model.onnx")
    x = torch.linspace(-40, 40, 4005).reshape(-1, 5)
    run = runners.open_onnx(tmp_path / "model.onnx", subject.signature.output_names, optimized=False)
    for result, expected in zip(run({"x": x}).values(), body(None, x.double()), strict=True):
        torch.testing.assert_close(result, expected.float(), rtol=5e-6, atol=5e-7)


@pytest.mark.slow
def test_the_sigmoid_of_a_silu_stays_an_operator(tmp_path: Path) -> None:
    def gates(m: nn.Module, x: torch.Tensor) -> Any:
        return functional.silu(x), x.flip(1) * functional.silu(x + 1)

    subject = files.prepare(Program(gates), {"x": torch.randn(4, 5)}, {"x": {0: "rows"}})
    files.save_onnx(subject, tmp_path / "model.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert operators.count("Sigmoid") == 2
    assert "Exp" not in operators
    files.assert_outputs(subject, tmp_path / "model.onnx", {"x": 9 * torch.randn(7, 5)})
