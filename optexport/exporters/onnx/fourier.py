"""Replaces Fourier transforms by matrix products for ONNX files.

ONNX Runtime 1.31 lacks the inverse of a one-sided spectrum. Its DFT is inexact for lengths that are not powers of two:
for 1,000 random numbers the relative error is 9e-4. torch's error is 4e-7, and a matrix product's is 1.3e-6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions

aten = torch.ops.aten


def replace_with_matmuls(program: ExportedProgram) -> ExportedProgram:
    """Returns a program with matrix products in place of Fourier transforms.

    The given program may change; do not use it afterwards. A product takes n² steps and a fast transform n log n. Both
    are small next to the rest of a model for frames of a thousand samples.
    """
    if not any("fft" in str(node.target) or "stft" in str(node.target) for node in program.graph.nodes):
        return program
    decompositions = {
        op: parts for op, parts in default_decompositions().items() if "fft" in str(op) or "stft" in str(op)
    }
    decompositions[aten._neg_view.default] = torch.neg  # the imaginary part of a conjugate
    decomposed: ExportedProgram = program.run_decompositions({**decompositions, **_MATMULS})
    return decomposed


def _fft_c2c(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    """Computes ``aten._fft_c2c``."""
    parts = (x.real, x.imag)
    for axis in dim:
        parts = _transform_axis(*parts, axis, forward)
    return _normalize(parts, [x.shape[axis] for axis in dim], normalization)


def _fft_r2c(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    """Computes ``aten._fft_r2c``; a one-sided result has only the first half of the last axis."""
    n = x.shape[dim[-1]]
    cos, sin = _cos_sin(n, n // 2 + 1 if onesided else n, n, x.dtype)
    parts = (_matmul(x, cos, dim[-1]), 0 - _matmul(x, sin, dim[-1]))  # not -0 for 0, because their angles differ
    for axis in dim[:-1]:
        parts = _transform_axis(*parts, axis, True)
    return _normalize(parts, [x.shape[axis] for axis in dim], normalization)


def _fft_c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: Any) -> torch.Tensor:
    """Computes ``aten._fft_c2r`` from the first half of a symmetric spectrum."""
    parts = (x.real, x.imag)
    for axis in dim[:-1]:
        parts = _transform_axis(*parts, axis, False)
    half = last_dim_size // 2 + 1
    cos, sin = _cos_sin(half, last_dim_size, last_dim_size, parts[0].dtype)
    places = torch.arange(half)
    is_unpaired = (places == 0).long() + (2 * places == torch.full((), last_dim_size, dtype=torch.int64)).long()
    factors = (2 - is_unpaired).to(cos.dtype)[:, None]
    real = _matmul(parts[0], factors * cos, dim[-1]) - _matmul(parts[1], factors * sin, dim[-1])
    sizes = [*(x.shape[axis] for axis in dim[:-1]), last_dim_size]
    return real * _scale(sizes, normalization, real.dtype)


def _transform_axis(
    real: torch.Tensor, imaginary: torch.Tensor, axis: int, forward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transforms one axis by exp(-2πi jk/n) if forward, and otherwise by exp(2πi jk/n)."""
    n = real.shape[axis]
    cos, sin = _cos_sin(n, n, n, real.dtype)
    if not forward:
        sin = -sin
    return (
        _matmul(real, cos, axis) + _matmul(imaginary, sin, axis),
        _matmul(imaginary, cos, axis) - _matmul(real, sin, axis),
    )


def _cos_sin(rows: Any, columns: Any, n: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin of 2π jk/n, each of shape [rows, columns].

    The integers jk are reduced modulo n before the division, which keeps the angles exact.
    """
    period = torch.full((), n, dtype=torch.int64)
    steps = torch.remainder(torch.arange(rows)[:, None] * torch.arange(columns), period)
    angles = steps.double() / period.double() * (2 * math.pi)
    # sin(π) is 1e-16 in float64, and its sign would decide the angle of a real number.
    sin = torch.where(torch.remainder(2 * steps, period) == 0, 0.0, torch.sin(angles))
    return torch.sin(angles + math.pi / 2).to(dtype), sin.to(dtype)


def _matmul(x: torch.Tensor, waves: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.matmul(x.movedim(axis, -1), waves).movedim(-1, axis)


def _normalize(parts: tuple[torch.Tensor, torch.Tensor], sizes: Sequence[Any], normalization: int) -> torch.Tensor:
    scale = _scale(sizes, normalization, parts[0].dtype)
    return torch.complex(parts[0] * scale, parts[1] * scale)


def _scale(sizes: Sequence[Any], normalization: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the factor of a normalization mode: 1, 1/√n and 1/n for 0, 1 and 2."""
    n = torch.full((), math.prod(sizes), dtype=torch.float64)
    return (n**0 if normalization == 0 else n.rsqrt() if normalization == 1 else n.reciprocal()).to(dtype)


_MATMULS: Mapping[Any, Any] = {
    aten._fft_c2c.default: _fft_c2c,
    aten._fft_r2c.default: _fft_r2c,
    aten._fft_c2r.default: _fft_c2r,
}
