"""What the rules that fold batch norms share: when a norm can be folded, and the arithmetic of it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from optexport.transformations.analysis import folding, modules


def scale_and_shift(norm: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm as ``scale * x + shift`` per channel: float64, shape ``(num_features,)``.

    From ``y = (x - mean) / sqrt(var + eps) * weight + bias`` (Ioffe and Szegedy, 2015), in float64, so that the fold
    rounds once.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.detach().double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.detach().double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return scale, shift


def why_not_affine(norm: _BatchNorm) -> str | None:
    """Why a norm is more than a constant scale and shift; None if it is not."""
    if norm.training:
        return "it is in train mode, where it normalises by the statistics of the batch"
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics"
    return None


def why_not_centred(norm: _BatchNorm) -> str | None:
    """Why what a norm subtracts is better subtracted from its input than from a sum of products of that; None if not.

    Both are the same but for rounding, which is relative to the mean, while the result is to the deviation.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    mean, variance = norm.running_mean.detach().double(), norm.running_var.detach().double()
    if bool((mean.abs() * torch.rsqrt(variance + norm.eps) > _FARTHEST).any()):
        return f"a mean is more than {_FARTHEST} standard deviations from zero, and would cancel late"
    return None


_FARTHEST = 16


def why_not_foldable(graph_module: GraphModule, norm_call: Node, layer_call: Node) -> str | None:
    """Why a norm cannot be folded into any layer, or a layer take one; None if they can."""
    for call in (norm_call, layer_call):
        if reason := folding.why_not_replaceable(graph_module, call):
            return reason
    norm = graph_module.get_submodule(str(norm_call.target))
    layer = graph_module.get_submodule(str(layer_call.target))
    assert isinstance(norm, _BatchNorm)
    if reason := why_not_affine(norm):
        return f"{norm_call.target}: {reason}"
    numbers = [norm.running_mean, norm.running_var]
    tensors = [*norm.parameters(), *(n for n in numbers if n is not None), *layer.parameters()]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return f"{norm_call.target} and {layer_call.target} differ in dtype or device"
    if reason := folding.why_not_trained_alike(layer, norm.parameters()):
        return f"{norm_call.target} and {layer_call.target}: {reason}"
    return None


def bypass(graph_module: GraphModule, norm_call: Node) -> None:
    """Takes a folded norm out of the graph and out of the module tree."""
    x = modules.sole_input(norm_call)
    assert x is not None
    norm_call.replace_all_uses_with(x)
    graph_module.graph.erase_node(norm_call)
    modules.remove_module(graph_module, str(norm_call.target))
