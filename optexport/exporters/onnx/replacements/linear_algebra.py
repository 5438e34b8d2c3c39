"""Inverses, equations and factors of small matrices, and distances; ONNX has only products and determinants."""

from __future__ import annotations

import math
from typing import Any

import torch

from optexport.exporters.onnx.refusals import UnsupportedError

# Elimination is written step by step, a dozen nodes for each row.
LARGEST = 16


def inverse(x: torch.Tensor) -> torch.Tensor:
    """Computes ``torch.linalg.inv``."""
    return _solve(x, torch.eye(x.shape[-1], dtype=x.dtype).expand_as(x))


def solve(a: torch.Tensor, b: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    """Computes ``torch.linalg.solve``."""
    if b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]):
        return _solve(a, b.unsqueeze(-1)).squeeze(-1)
    return _solve(a, b) if left else _solve(a.mT, b.mT).mT


def solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Computes ``torch.linalg.solve_triangular``, which ignores the other triangle."""
    triangle = a.triu(int(unitriangular)) if upper else a.tril(-int(unitriangular))
    if unitriangular:
        triangle = triangle + torch.eye(a.shape[-1], dtype=a.dtype)
    return _solve(triangle, b) if left else _solve(triangle.mT, b.mT).mT


def cholesky_solve(b: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Computes ``torch.cholesky_solve``."""
    lower = factor.triu().mT if upper else factor.tril()
    return _solve(lower.mT, _solve(lower, b))


def _solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Solves a X = b by Gauss-Jordan elimination; the pivot is the largest element of its column."""
    n = _size(a)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    m = torch.cat([a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])], -1)
    rows = torch.arange(n)
    for i in range(n):
        pivot = m[..., i:, i].abs().argmax(-1, keepdim=True) + i
        swapped = torch.where(rows == i, pivot, torch.where(rows == pivot, i, rows))
        m = m.gather(-2, swapped.unsqueeze(-1).expand_as(m))
        row = m[..., i : i + 1, :] / m[..., i : i + 1, i : i + 1]
        m = torch.where((rows == i).unsqueeze(-1), row, m - m[..., i : i + 1] * row)
    return m[..., n:]


def slogdet(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``torch.linalg.slogdet`` from the determinant."""
    determinant = torch.det(x)
    return torch.sign(determinant), determinant.abs().log()


def cholesky(x: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Computes ``torch.linalg.cholesky``, column by column; it reads the lower triangle only, or the upper one."""
    n = _size(x)
    x = x.mT if upper else x
    rows = torch.arange(n)
    columns: list[torch.Tensor] = []
    for i in range(n):
        column = x[..., i]
        if columns:
            factor = torch.stack(columns, -1)
            column = column - (factor * factor[..., i : i + 1, :]).sum(-1)
        column = column / column[..., i : i + 1].sqrt()
        columns.append(torch.where(rows >= i, column, torch.zeros((), dtype=x.dtype)))
    factor = torch.stack(columns, -1)
    return factor.mT if upper else factor


def _size(x: torch.Tensor) -> int:
    n = x.shape[-1]
    if not isinstance(n, int) or n > LARGEST:
        raise UnsupportedError(
            f"ONNX has no operator for it, and it is written step by step for at most {LARGEST} rows"
            f" (found {n if isinstance(n, int) else 'a dynamic number'})"
        )
    return n


def cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, *_: Any) -> torch.Tensor:
    """Computes ``torch.cdist`` from the differences of all pairs of rows."""
    difference = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    if p == math.inf:
        return difference.amax(-1)
    if p == 0:
        return (difference != 0).to(x.dtype).sum(-1)
    return difference.sum(-1) if p == 1 else difference.pow(p).sum(-1).pow(1 / p)


def pdist(x: torch.Tensor, p: float = 2.0) -> Any:
    """Computes ``torch.nn.functional.pdist``: the distances of each row from the rows after it."""
    size = x.shape[0]
    return cdist(x, x, p)[torch.ones(size, size, dtype=torch.bool).triu(1)]
