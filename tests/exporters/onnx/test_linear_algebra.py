"""Inverses, equations, factors and distances in ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import linalg, nn
from torch.nn import functional

from optexport import Dim
from optexport.errors import ExportError
from tests._helpers.graphs import Program
from tests.exporters import files

BATCH = {"x": {0: Dim("batch", 1, 40)}}


def _matrices(count: int, n: int) -> dict[str, torch.Tensor]:
    """Returns matrices that need pivots: the first element of some is 0."""
    x = torch.randn(count, n, n) + 2 * torch.eye(n).roll(1, 0)
    x[0, 0, 0] = 0
    return {"x": x}


def _inverses(m: nn.Module, x: torch.Tensor) -> Any:
    return linalg.inv(x), torch.inverse(x.double()), linalg.solve(x, x.sum(-1)), linalg.solve(x, x.mT @ x)


@pytest.mark.slow
def test_inverse_chooses_pivots(tmp_path: Path) -> None:
    files.assert_onnx(Program(_inverses), _matrices(3, 3), BATCH, tmp_path, _matrices(7, 3), _matrices(1, 3))


def _factors(m: nn.Module, x: torch.Tensor) -> Any:
    square = x @ x.mT + torch.eye(x.shape[-1])
    factor = linalg.cholesky(square)
    right = linalg.solve(square, x, left=False)
    triangular = [
        linalg.solve_triangular(square, x, upper=upper, unitriangular=unit)
        for upper, unit in ((True, False), (False, True))
    ]
    solved = torch.cholesky_solve(x, factor)
    return (
        factor,
        linalg.cholesky(square, upper=True),
        right,
        triangular,
        solved,
        linalg.slogdet(x),
        torch.logdet(square),
    )


@pytest.mark.slow
def test_factors_and_equations_agree_with_torch(tmp_path: Path) -> None:
    files.assert_onnx(Program(_factors), _matrices(3, 4), BATCH, tmp_path, _matrices(5, 4))


def _distances(m: nn.Module, x: torch.Tensor) -> Any:
    y = x.flip(1)[:, 1:] + 0.5
    return functional.pdist(x[0].T), [torch.cdist(x, y, p=p) for p in (0.0, 1.0, 2.0, 3.0, torch.inf)]


@pytest.mark.slow
def test_distances_of_any_number_of_points(tmp_path: Path) -> None:
    """torch.onnx refuses cdist, and a trace at 5 points was valid up to 25 points."""
    model, example, dynamic = Program(_distances), {"x": torch.randn(2, 5, 3)}, {"x": {1: Dim("points", 2, 100)}}
    files.assert_onnx(model, example, dynamic, tmp_path, *({"x": torch.randn(2, n, 3)} for n in (2, 9, 60)))


@pytest.mark.parametrize("size", ["a dynamic number", "17"])
def test_inverse_of_a_large_matrix_is_refused(size: str, tmp_path: Path) -> None:
    dynamic = {"x": {0: Dim("n", 2, 40), 1: Dim("n", 2, 40)}} if size == "a dynamic number" else {}
    subject = files.prepare(Program(lambda m, x: linalg.inv(x)), {"x": torch.randn(17, 17)}, dynamic)
    with pytest.raises(ExportError, match=f"aten.linalg_inv, at .*: ONNX has no operator .*found {size}"):
        files.save_onnx(subject, tmp_path / "model.onnx")
