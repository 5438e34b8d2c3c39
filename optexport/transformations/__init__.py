"""Transformations of ``torch.fx`` graphs, with the contract of Optimum's FX library.

Each rule has a file. To write a rule, copy one, or subclass `Rule` or `Transformation`.

Names are imported on first use, so that reading the registry of rules does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optexport.transformations.base import ReversibleTransformation as ReversibleTransformation
    from optexport.transformations.base import Transformation as Transformation
    from optexport.transformations.cast_precision import CastPrecision as CastPrecision
    from optexport.transformations.change_true_div_to_mul_by_inverse import (
        ChangeTrueDivToMulByInverse as ChangeTrueDivToMulByInverse,
    )
    from optexport.transformations.composition import DeepCopy as DeepCopy
    from optexport.transformations.composition import LintAndRecompile as LintAndRecompile
    from optexport.transformations.composition import compose as compose
    from optexport.transformations.fold_constants import FoldConstants as FoldConstants
    from optexport.transformations.fold_norm_affine import FoldNormAffine as FoldNormAffine
    from optexport.transformations.fold_scale import FoldScale as FoldScale
    from optexport.transformations.fuse_attention import FuseAttention as FuseAttention
    from optexport.transformations.fuse_batch_norm import FuseBatchNorm as FuseBatchNorm
    from optexport.transformations.fuse_batch_norm_1d_in_linear import (
        FuseBatchNorm1dInLinear as FuseBatchNorm1dInLinear,
    )
    from optexport.transformations.fuse_batch_norm_2d_in_conv_2d import (
        FuseBatchNorm2dInConv2d as FuseBatchNorm2dInConv2d,
    )
    from optexport.transformations.fuse_bias import FuseBias as FuseBias
    from optexport.transformations.fuse_bias_in_linear import FuseBiasInLinear as FuseBiasInLinear
    from optexport.transformations.keep_outputs import KeepOutputs as KeepOutputs
    from optexport.transformations.merge_linear_chain import MergeLinearChain as MergeLinearChain
    from optexport.transformations.merge_linears import MergeLinears as MergeLinears
    from optexport.transformations.merge_parallel_convs import MergeParallelConvs as MergeParallelConvs
    from optexport.transformations.remove_no_ops import RemoveNoOps as RemoveNoOps
    from optexport.transformations.replace_activation import ReplaceActivation as ReplaceActivation
    from optexport.transformations.rule import Match as Match
    from optexport.transformations.rule import Report as Report
    from optexport.transformations.rule import ReversibleRule as ReversibleRule
    from optexport.transformations.rule import Rule as Rule
    from optexport.transformations.rule import Skip as Skip
    from optexport.transformations.share_equal import ShareEqual as ShareEqual
    from optexport.transformations.sink_select import SinkSelect as SinkSelect

_HOMES = {
    "CastPrecision": "cast_precision",
    "ChangeTrueDivToMulByInverse": "change_true_div_to_mul_by_inverse",
    "DeepCopy": "composition",
    "FoldConstants": "fold_constants",
    "FoldNormAffine": "fold_norm_affine",
    "FoldScale": "fold_scale",
    "FuseAttention": "fuse_attention",
    "FuseBatchNorm": "fuse_batch_norm",
    "FuseBatchNorm1dInLinear": "fuse_batch_norm_1d_in_linear",
    "FuseBatchNorm2dInConv2d": "fuse_batch_norm_2d_in_conv_2d",
    "FuseBias": "fuse_bias",
    "FuseBiasInLinear": "fuse_bias_in_linear",
    "KeepOutputs": "keep_outputs",
    "LintAndRecompile": "composition",
    "Match": "rule",
    "MergeLinearChain": "merge_linear_chain",
    "MergeLinears": "merge_linears",
    "MergeParallelConvs": "merge_parallel_convs",
    "RemoveNoOps": "remove_no_ops",
    "ReplaceActivation": "replace_activation",
    "Report": "rule",
    "ReversibleRule": "rule",
    "ReversibleTransformation": "base",
    "Rule": "rule",
    "ShareEqual": "share_equal",
    "SinkSelect": "sink_select",
    "Skip": "rule",
    "Transformation": "base",
    "compose": "composition",
}

__all__ = [
    "CastPrecision",
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
    "FoldConstants",
    "FoldNormAffine",
    "FoldScale",
    "FuseAttention",
    "FuseBatchNorm",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBias",
    "FuseBiasInLinear",
    "KeepOutputs",
    "LintAndRecompile",
    "Match",
    "MergeLinearChain",
    "MergeLinears",
    "MergeParallelConvs",
    "RemoveNoOps",
    "ReplaceActivation",
    "Report",
    "ReversibleRule",
    "ReversibleTransformation",
    "Rule",
    "ShareEqual",
    "SinkSelect",
    "Skip",
    "Transformation",
    "compose",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *_HOMES])
