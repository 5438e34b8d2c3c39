"""Transformations of ``torch.fx`` graphs, with the contract of Optimum's FX library.

Each rule has a file. To write a rule, copy one, or subclass `Rule` or `Transformation`.
"""

from optexport.transformations.base import ReversibleTransformation, Transformation
from optexport.transformations.cast_precision import CastPrecision
from optexport.transformations.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from optexport.transformations.composition import DeepCopy, LintAndRecompile, compose
from optexport.transformations.fold_norm_affine import FoldNormAffine
from optexport.transformations.fold_scale import FoldScale
from optexport.transformations.fuse_attention import FuseAttention
from optexport.transformations.fuse_batch_norm import FuseBatchNorm
from optexport.transformations.fuse_batch_norm_1d_in_linear import FuseBatchNorm1dInLinear
from optexport.transformations.fuse_batch_norm_2d_in_conv_2d import FuseBatchNorm2dInConv2d
from optexport.transformations.fuse_bias import FuseBias
from optexport.transformations.fuse_bias_in_linear import FuseBiasInLinear
from optexport.transformations.keep_outputs import KeepOutputs
from optexport.transformations.merge_linear_chain import MergeLinearChain
from optexport.transformations.merge_linears import MergeLinears
from optexport.transformations.merge_parallel_convs import MergeParallelConvs
from optexport.transformations.remove_no_ops import RemoveNoOps
from optexport.transformations.replace_activation import ReplaceActivation
from optexport.transformations.rule import Match, Report, ReversibleRule, Rule, Skip
from optexport.transformations.share_equal import ShareEqual
from optexport.transformations.sink_select import SinkSelect

__all__ = [
    "CastPrecision",
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
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
