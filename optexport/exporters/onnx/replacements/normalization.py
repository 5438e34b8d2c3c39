"""Norms over the positions of each channel or group.

``torch.onnx`` writes ``InstanceNormalization``. ONNX Runtime 1.31 computes its mean as one sum in float32: for 786,432
equal values, the result is 0.28 instead of 0 (tests/exporters/onnx/test_normalization.py). Means along one axis at a
time round less. They take longer, but to subtract the mean first is not enough, because the variance is such a sum too.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def instance_norm(  # noqa: PLR0913  # the operator's arguments
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """Normalizes each channel of each row."""
    if not use_input_stats:
        args = (x, weight, bias, mean, variance, use_input_stats, momentum, eps, cudnn_enabled)
        return aten.instance_norm.default(*args)  # type: ignore[no-any-return]
    return _scale(_normalize(x, range(2, x.dim()), eps), weight, bias)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    """Normalizes each group of channels of each row."""
    groups = x.unflatten(1, (num_groups, x.shape[1] // num_groups))
    return _scale(_normalize(groups, range(2, groups.dim()), eps).flatten(1, 2), weight, bias)


def _normalize(x: torch.Tensor, axes: range, eps: float) -> torch.Tensor:
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # as torch does
    centered = values - _mean(values, axes)
    return (centered * torch.rsqrt(_mean(centered * centered, axes) + eps)).to(x.dtype)


def _mean(x: torch.Tensor, axes: range) -> torch.Tensor:
    for axis in reversed(axes):
        x = x.mean(axis, keepdim=True)
    return x


def _scale(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    shape: Any = (-1, *[1] * (x.dim() - 2))
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)
