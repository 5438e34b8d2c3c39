"""FuseBatchNorm2dInConv2d: `FuseBatchNorm` for BatchNorm2d after Conv2d only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optexport.transformations.fuse_batch_norm import FuseBatchNorm


@dataclass(frozen=True)
class FuseBatchNorm2dInConv2d(FuseBatchNorm):
    """Folds a BatchNorm2d into the Conv2d before it.

    BatchNorm2d(Conv2d(x))  ->  Conv2d'(x)

    Skips, Exact, Inverse: see `FuseBatchNorm`.
    """

    norms = (nn.BatchNorm2d,)
    layers = (nn.Conv2d,)
    before = False
