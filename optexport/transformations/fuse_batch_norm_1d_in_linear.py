"""FuseBatchNorm1dInLinear: `FuseBatchNorm` for BatchNorm1d and Linear only, as in Optimum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optexport.transformations.fuse_batch_norm import FuseBatchNorm


@dataclass(frozen=True)
class FuseBatchNorm1dInLinear(FuseBatchNorm):
    """Folds a BatchNorm1d into the Linear before or after it.

    BatchNorm1d(Linear(x))  ->  Linear'(x)        Linear(BatchNorm1d(x))  ->  Linear'(x)

    Skips:   as in `FuseBatchNorm`.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the statistics of the norm are not kept.
    """

    norms = (nn.BatchNorm1d,)
    layers = (nn.Linear,)
