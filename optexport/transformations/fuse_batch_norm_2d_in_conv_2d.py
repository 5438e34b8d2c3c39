"""FuseBatchNorm2dInConv2d: `FuseBatchNorm` for BatchNorm2d after Conv2d only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optexport.transformations.fuse_batch_norm import FuseBatchNorm


@dataclass(frozen=True)
class FuseBatchNorm2dInConv2d(FuseBatchNorm):
    """Folds a BatchNorm2d into the Conv2d before it.

    BatchNorm2d(Conv2d(x))  ->  Conv2d'(x)

    Skips:   as in `FuseBatchNorm`.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the statistics of the norm are not kept.
    """

    norms = (nn.BatchNorm2d,)
    layers = (nn.Conv2d,)
    before = False
