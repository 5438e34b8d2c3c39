"""A batch norm before or after a linear becomes part of it: Optimum's own case of `FuseBatchNorm`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optexport.transformations.fuse_batch_norm import FuseBatchNorm


@dataclass(frozen=True)
class FuseBatchNorm1dInLinear(FuseBatchNorm):
    """BatchNorm1d(Linear(x))  ->  Linear'(x)        Linear(BatchNorm1d(x))  ->  Linear'(x)

    Skips, Exact, Inverse: as `FuseBatchNorm`.
    """

    norms = (nn.BatchNorm1d,)
    layers = (nn.Linear,)
