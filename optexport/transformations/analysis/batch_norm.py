"""Conditions and arithmetic that the rules for batch norms share."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from optexport.transformations.analysis import folding, modules

_MAX_DEVIATIONS = 16


def scale_and_shift(norm: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm as ``scale * x + shift``; both float64, of shape ``(num_features,)``.

    From ``y = (x - mean) / sqrt(var + eps) * weight + bias`` (Ioffe and Szegedy, 2015). Computed in float64, so that
    the folded weights are rounded only once.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.detach().double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.detach().double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return scale, shift


def find_affine_problem(norm: _BatchNorm) -> str | None:
    """Returns why a norm is not a constant scale and shift, or None if it is."""
    if norm.training:
        return "the norm is in train mode and uses the statistics of the batch"
    if norm.running_mean is None or norm.running_var is None:
        return "the norm has no running statistics"
    return None


def find_mean_problem(norm: _BatchNorm) -> str | None:
    """Returns why the mean should be subtracted before a layer and not after it, or None.

    Both are equal except for rounding. After the layer, rounding is relative to the mean, but the result is relative to
    the standard deviation.
    """
    assert norm.running_mean is not None and norm.running_var is not None
    mean, variance = norm.running_mean.detach().double(), norm.running_var.detach().double()
    if bool((mean.abs() * torch.rsqrt(variance + norm.eps) > _MAX_DEVIATIONS).any()):
        return f"a mean is more than {_MAX_DEVIATIONS} standard deviations from zero, which would lose precision"
    return None


def find_fold_problem(graph_module: GraphModule, norm_call: Node, layer_call: Node) -> str | None:
    """Returns why a norm cannot be folded into a layer, or None."""
    for call in (norm_call, layer_call):
        if reason := folding.find_replacement_problem(graph_module, call):
            return reason
    norm = graph_module.get_submodule(str(norm_call.target))
    layer = graph_module.get_submodule(str(layer_call.target))
    assert isinstance(norm, _BatchNorm)
    if reason := find_affine_problem(norm):
        return f"{norm_call.target}: {reason}"
    statistics = [norm.running_mean, norm.running_var]
    tensors = [*norm.parameters(), *(s for s in statistics if s is not None), *layer.parameters()]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return f"{norm_call.target} and {layer_call.target} differ in dtype or device"
    if reason := folding.find_training_problem(layer, norm.parameters()):
        return f"{norm_call.target} and {layer_call.target}: {reason}"
    return None


def bypass(graph_module: GraphModule, norm_call: Node) -> None:
    """Removes a folded norm from the graph and from the module tree."""
    x = modules.sole_input(norm_call)
    assert x is not None
    norm_call.replace_all_uses_with(x)
    graph_module.graph.erase_node(norm_call)
    modules.remove_module(graph_module, str(norm_call.target))
