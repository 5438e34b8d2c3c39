"""Replaces the weights of a layer, and says why that is impossible.

A function ``find_*_problem`` returns the reason why something is impossible, or None.
"""

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


def find_plain_problem(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Returns why a module may behave differently from a new one of its class, or None.

    Reasons are a subclass, hooks, parametrized weights, weights of another shape, and tensors that the class does not
    have. Other attributes and hooks on loading are allowed, because a copy of the module keeps them.
    """
    return _find_code_problem(module, cls) or _find_tensor_problem(module, cls) or _find_shape_problem(module)


def _find_code_problem(module: nn.Module, cls: type[nn.Module]) -> str | None:
    if type(module) is not cls:
        return f"{type(module).__name__} is a subclass of {cls.__name__}"
    if modules.has_hooks(module):
        return "the module has hooks"
    if "forward" in vars(module):
        return "the forward method was replaced"
    if module._modules:
        return "the weight is computed by a parametrization"
    attributes = vars(module)
    if "running_var" in attributes or any(n in attributes or n in module._buffers for n in ("weight", "bias")):
        return "the weight or bias is not a parameter"
    if module._state_dict_hooks or module._state_dict_pre_hooks:
        return "the module has hooks on its state_dict"
    return None


def _find_tensor_problem(module: nn.Module, cls: type[nn.Module]) -> str | None:
    buffers = ("running_mean", "running_var", "num_batches_tracked") if isinstance(module, _NormBase) else ()
    for name in (*module._parameters.keys() - {"weight", "bias"}, *module._buffers.keys() - {*buffers}):
        return f"the tensor {name} does not belong to {cls.__name__}"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"the {name} is a {type(parameter).__name__}, a subclass of Parameter"
    return None


def _find_shape_problem(module: nn.Module) -> str | None:
    weight, bias = _expected_shapes(module)
    shapes = {"weight": weight, "bias": bias, "running_mean": bias, "running_var": bias}
    for name, shape in shapes.items():
        tensor = getattr(module, name, None)
        if shape is not None and tensor is not None and tensor.shape != shape:
            return f"the shape of the {name} does not fit the sizes of the module"
    return None


def _expected_shapes(module: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the shapes of weight and bias that follow from a module's sizes, or None."""
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


def find_sharing_problem(graph_module: GraphModule, target: str, module: nn.Module) -> str | None:
    """Returns why replacing a module would change something else, or None."""
    if reason := usage.uses(graph_module).find_sharing_problem(target, module):
        return reason
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        changes = [] if tensor is None else memory.find_constant_changes(graph_module, [tensor])
        if change := next((change for change in changes if change.target != target), None):
            return f"the {name} is changed in place by {change.name}"
    return None


def find_replacement_problem(graph_module: GraphModule, call: Node) -> str | None:
    """Returns why a called module cannot be replaced by one with other weights, or None.

    The module must be plain and used by this call alone, and its weights must determine its result.
    """
    target = str(call.target)
    module = graph_module.get_submodule(target)
    torch_class = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules."))
    reason = find_plain_problem(module, torch_class) or find_sharing_problem(graph_module, target, module)
    reason = reason or _find_call_problem(graph_module, call, module) or find_layout_problem(module)
    return f"{target}: {reason}" if reason else None


def _find_call_problem(graph_module: GraphModule, call: Node, module: nn.Module) -> str | None:
    if len(calls := usage.uses(graph_module).calls_of(str(call.target))) > 1:
        # A branch on values computes both ways, with the layers before it in each.
        sources = {tuple((source.op, source.target) for source in other.all_input_nodes) for other in calls}
        hint = ", perhaps on equal inputs, which share-equal before this rule would join" if len(sources) == 1 else ""
        return f"the module is called more than once{hint}"
    if modules.sole_input(call) is None:
        return "the module is not called with a single tensor"
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return "the weights are on the meta device"
    if modes.casts(graph_module, call):
        return "the module is called under autocast, so results and weights differ in dtype"
    if not all(parameter.is_floating_point() for parameter in module.parameters()):
        return "the weights are not real floating-point numbers"
    return None


def find_layout_problem(layer: nn.Module) -> str | None:
    """Returns why new weights cannot have the strides of a layer's weights, or None.

    The strides must leave no gaps, and no two elements may share memory.
    """
    for name, parameter in layer.named_parameters():
        dense = parameter.layout is torch.strided
        if not dense or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            return f"the strides of the {name} have gaps or overlap"
    return None


def find_training_problem(layer: nn.Module, tensors: Iterable[torch.Tensor | None]) -> str | None:
    """Returns why folding tensors into a layer would change what is trained, or None.

    Parameters must have the requires_grad of the layer. Other tensors do not matter.
    """
    flags = {tensor.requires_grad for tensor in tensors if isinstance(tensor, nn.Parameter)}
    if flags and len(flags | {parameter.requires_grad for parameter in layer.parameters()}) > 1:
        return "the tensors differ in requires_grad"
    return None


def find_range_problem(target: object, layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Returns why a new weight and bias (float64) do not fit the dtype of a layer, or None.

    They must be finite in that dtype. For each input and output feature, the rounding error of all weights together
    may not exceed the rounding error of normal numbers. So a few weights that become subnormal among larger ones are
    allowed. Every feature is checked separately, because a later norm may enlarge it, or its input may be large.
    """
    value, dtype = weight.detach().double(), layer.weight.dtype
    groups = getattr(layer, "groups", 1)
    by_feature = (groups, len(value) // groups, value.shape[1], math.prod(value.shape[2:]))
    limit = value.abs().reshape(by_feature) * torch.finfo(dtype).eps
    error = (value.to(dtype).double() - value).abs().reshape(by_feature)
    precise = all(bool((error.sum(axes) <= limit.sum(axes)).all()) for axes in ((1, 3), (2, 3)))
    if not precise or (bias is not None and not bool(bias.detach().to(dtype).isfinite().all())):
        return f"{target}: the weights would overflow or become subnormal"
    return None


def with_weights(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Copies a layer with a new weight and bias, rounded to its dtype.

    Both keep their requires_grad, and their strides if the shape is the same. A new bias gets the requires_grad of the
    weight.
    """
    parameters: dict[str, nn.Parameter | None] = {}
    for name, value, old in (("weight", weight, layer.weight), ("bias", bias, layer.bias)):
        if value is None:
            parameters[name] = None
            continue
        rounded = value.detach().to(layer.weight.dtype)
        if old is not None and old.shape == rounded.shape and old.stride() != rounded.stride():
            rounded = torch.empty_like(old).copy_(rounded)
        requires_grad = (layer.weight if old is None else old).requires_grad
        parameters[name] = nn.Parameter(rounded, requires_grad=requires_grad)
    return modules.with_parameters(layer, **parameters)
