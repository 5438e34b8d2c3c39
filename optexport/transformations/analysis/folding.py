"""When the weights of a layer can be replaced, and a layer with others in their place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from optexport.transformations.analysis import memory, modes, modules, usage


def why_not_plain(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Why a module is more, or something else, than its class and sizes say; None if it is plain.

    It may be a subclass, have hooks, weights that are computed on the fly or of another shape, or hold tensors that its
    class knows nothing of. Attributes that are no tensors of its own, and hooks on loading, do not count: a copy of the
    module keeps them.
    """
    if type(module) is not cls:
        return f"it is a {type(module).__name__}, a subclass of {cls.__name__}"
    if modules.has_hooks(module):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced"
    if module._modules:
        return "its weight is computed by a parametrization"
    held = vars(module)
    if any(name in held or name in module._buffers for name in ("weight", "bias")) or "running_var" in held:
        return "its weight or bias is no parameter of it"
    if module._state_dict_hooks or module._state_dict_pre_hooks:
        return "it has hooks on its state_dict"
    buffers = ("running_mean", "running_var", "num_batches_tracked") if isinstance(module, _NormBase) else ()
    for name in (*module._parameters.keys() - {"weight", "bias"}, *module._buffers.keys() - {*buffers}):
        return f"it holds {name}, which no {cls.__name__} has"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}, a subclass of Parameter"
    weight, bias = _shapes(module)
    shapes = {"weight": weight, "bias": bias, "running_mean": bias, "running_var": bias}
    for name, shape in shapes.items():
        tensor = getattr(module, name, None)
        if shape is not None and tensor is not None and tensor.shape != shape:
            return f"its {name} has another shape than its sizes say"
    return None


def _shapes(module: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The shapes of weight and bias that the sizes of a layer or norm ask for; None where it has none."""
    match module:
        case nn.Linear():
            return (module.out_features, module.in_features), (module.out_features,)
        case _ConvNd():
            ends = [module.out_channels, module.in_channels][:: -1 if module.transposed else 1]
            return (ends[0], ends[1] // module.groups, *module.kernel_size), (module.out_channels,)
        case _BatchNorm():
            return (module.num_features,), (module.num_features,)
        case nn.LayerNorm():
            return tuple(module.normalized_shape), tuple(module.normalized_shape)
        case nn.Embedding():
            return (module.num_embeddings, module.embedding_dim), None
    return None, None


def why_shared(graph_module: GraphModule, target: str, module: nn.Module) -> str | None:
    """Why a module cannot be replaced without changing something else; None where it can."""
    if reason := usage.uses(graph_module).why_shared(target, module):
        return reason
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        changes = [] if tensor is None else memory.changes_constant(graph_module, [tensor])
        if change := next((change for change in changes if change.target != target), None):
            return f"its {name} is changed in place by {change.name}"
    return None


def why_not_replaceable(graph_module: GraphModule, call: Node) -> str | None:
    """Why the module of a call cannot be replaced by one that does something else, and what it does be told from its
    parameters alone; None if it can."""
    target = str(call.target)
    module, found = graph_module.get_submodule(target), usage.uses(graph_module)
    torch_class = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules."))
    reason = why_not_plain(module, torch_class) or why_shared(graph_module, target, module)
    if reason is None and len(found.calls_of(target)) > 1:
        reason = "it is called more than once"
    if reason is None and modules.sole_input(call) is None:
        reason = "it is not called on a single tensor"
    if reason is None and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        reason = "its weights hold no numbers"
    if reason is None and modes.casts(graph_module, call):
        reason = "it is called under autocast, where its results are of another dtype than its weights"
    if reason is None and not all(parameter.is_floating_point() for parameter in module.parameters()):
        reason = "its weights hold no real numbers"
    reason = reason or why_not_dense(module)
    return f"{target}: {reason}" if reason else None


def why_not_dense(layer: nn.Module) -> str | None:
    """Why other weights cannot have the strides that a layer's have; None where there are neither gaps between the
    numbers of each, nor is any there twice."""
    for name, own in layer.named_parameters():
        if own.layout is not torch.strided or torch.empty_like(own, device="meta").stride() != own.stride():
            return f"its {name} does not fill the memory that it spans"
    return None


def why_not_trained_alike(layer: nn.Module, others: Iterable[torch.Tensor | None]) -> str | None:
    """Why what becomes part of a layer would be trained no more, or from then on; None if it is trained as the layer
    is, or is no parameter."""
    flags = {other.requires_grad for other in others if isinstance(other, nn.Parameter)}
    if flags and len(flags | {parameter.requires_grad for parameter in layer.parameters()}) > 1:
        return "they differ in requires_grad"
    return None


def why_not_held(target: object, layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why a layer cannot have another weight and bias, given in float64, in its own dtype; None if it can.

    They have to be finite there. And of all weights of one feature, an input or an output, rounding may lose no more
    than it does of normal numbers: a few that become subnormal among larger ones do not matter. A single feature of
    which it loses more rules out the layer, however small that is beside the others: what reads the result may enlarge
    each feature by itself, as a norm does, and what is read may be large in that feature alone.
    """
    value, dtype = weight.detach().double(), layer.weight.dtype
    groups = getattr(layer, "groups", 1)
    by_feature = (groups, len(value) // groups, value.shape[1], math.prod(value.shape[2:]))
    size = value.abs().reshape(by_feature) * torch.finfo(dtype).eps
    lost = (value.to(dtype).double() - value).abs().reshape(by_feature)
    kept = all(bool((lost.sum(axes) <= size.sum(axes)).all()) for axes in ((1, 3), (2, 3)))
    if not kept or (bias is not None and not bool(bias.detach().to(dtype).isfinite().all())):
        return f"{target}: its weights would overflow or become subnormal"
    return None


def with_weights(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """A copy of a layer with another weight and bias, rounded to its dtype; each asks for gradients as before, and has
    the strides that it had, unless its shape is another.

    A bias that the layer had not asks for them as the weight does.
    """
    new: dict[str, nn.Parameter | None] = {}
    for name, value, own in (("weight", weight, layer.weight), ("bias", bias, layer.bias)):
        if value is None:
            new[name] = None
            continue
        rounded = value.detach().to(layer.weight.dtype)
        if own is not None and own.shape == rounded.shape and own.stride() != rounded.stride():
            rounded = torch.empty_like(own).copy_(rounded)
        flags = layer.weight if own is None else own
        new[name] = nn.Parameter(rounded, requires_grad=flags.requires_grad)
    return modules.with_parameters(layer, **new)
