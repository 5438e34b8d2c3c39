"""What the rules that fold batch norms share: when a norm can be folded, and the arithmetic of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from optexport.transformations import modules


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


def why_not_foldable(graph_module: GraphModule, norm_call: Node, layer_call: Node) -> str | None:
    """Why a norm cannot be folded into any layer, or a layer take one; None if they can."""
    uses = modules.uses(graph_module)
    for call in (norm_call, layer_call):
        target = str(call.target)
        module = graph_module.get_submodule(target)
        reason = modules.why_not_plain(module, _torch_class(module)) or uses.why_shared(target, module)
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


def _torch_class(module: nn.Module) -> type[nn.Module]:
    """The class of torch's own that a module is of, or derived from."""
    return next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules."))


def bypass(graph_module: GraphModule, norm_call: Node) -> None:
    """Takes a folded norm out of the graph and out of the module tree."""
    x = modules.sole_input(norm_call)
    assert x is not None
    norm_call.replace_all_uses_with(x)
    graph_module.graph.erase_node(norm_call)
    modules.remove_module(graph_module, str(norm_call.target))
