"""What the rules that fold batch norms share: when a norm can be folded, and the arithmetic of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations import modules

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def scale_and_shift(norm: BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
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


def why_not_foldable(
    graph_module: GraphModule,
    norm_call: Node,
    norm_class: type[nn.Module],
    layer_call: Node,
    layer_class: type[nn.Module],
) -> str | None:
    """Why a norm cannot be folded into the layer next to it; None if it can."""
    uses = modules.uses(graph_module)
    for call, cls in ((norm_call, norm_class), (layer_call, layer_class)):
        target = str(call.target)
        module = graph_module.get_submodule(target)
        reason = modules.why_not_plain(module, cls) or uses.why_shared(target, module)
        if reason is None and len(uses.calls_of(target)) > 1:
            reason = "it is called more than once"
        if reason is None and modules.sole_input(call) is None:
            reason = "it is not called on a single tensor"
        if reason:
            return f"{target}: {reason}"
    norm = graph_module.get_submodule(str(norm_call.target))
    layer = graph_module.get_submodule(str(layer_call.target))
    if norm.training:
        return f"{norm_call.target}: it is in train mode, where it normalises by the statistics of the batch"
    if norm.running_mean is None or norm.running_var is None:
        return f"{norm_call.target}: it keeps no running statistics"
    tensors = [*norm.parameters(), norm.running_mean, norm.running_var, *layer.parameters()]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return f"{norm_call.target} and {layer_call.target} differ in dtype or device"
    return None


def set_parameters(
    layer: nn.Linear | nn.Conv2d, source: nn.Linear | nn.Conv2d, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """Gives a new layer folded parameters, in the dtype of the layer that it replaces."""
    requires_grad = source.weight.requires_grad
    layer.weight = nn.Parameter(weight.to(source.weight.dtype), requires_grad=requires_grad)
    if source.bias is not None:
        requires_grad = source.bias.requires_grad
    layer.bias = nn.Parameter(bias.to(source.weight.dtype), requires_grad=requires_grad)


def bypass(graph_module: GraphModule, norm_call: Node) -> None:
    """Takes a folded norm out of the graph and out of the module tree."""
    x = modules.sole_input(norm_call)
    assert x is not None
    norm_call.replace_all_uses_with(x)
    graph_module.graph.erase_node(norm_call)
    modules.remove_module(graph_module, str(norm_call.target))
