"""A batch norm after a convolution becomes part of it: Optimum's own case of `FuseBatchNorm`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optexport.transformations.fuse_batch_norm import FuseBatchNorm


@dataclass(frozen=True)
class FuseBatchNorm2dInConv2d(FuseBatchNorm):
    """BatchNorm2d(Conv2d(x))  ->  Conv2d'(x)

    Skips, Exact, Inverse: as `FuseBatchNorm`.
    """

    norms = (nn.BatchNorm2d,)
    layers = (nn.Conv2d,)
    before = False
