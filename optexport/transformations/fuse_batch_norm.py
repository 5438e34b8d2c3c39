"""FuseBatchNorm: folds a batch norm into a neighboring linear or convolution."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from optexport.transformations.analysis import axes, batch_norm, folding, memory, modules
from optexport.transformations.remove_no_ops import find_local_no_op
from optexport.transformations.rule import Match, Rule, Skip

_NORMS: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS: tuple[type[_ConvNd], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: tuple[type[_ConvNd], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RANKS = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}


@dataclass(frozen=True)
class Fold(Match):
    """A norm before or after a layer.

    Attributes:
        norm: The call of the norm.
        layer: The call of the layer.
        space: Number of features per channel of a norm before a flatten, else 1.
    """

    norm: Node
    layer: Node
    space: int


@dataclass(frozen=True)
class FuseBatchNorm(Rule):
    """Folds a batch norm into the linear or convolution before or after it.

    BatchNorm(Layer(x))  ->  Layer'(x)        Layer(BatchNorm(x))  ->  Layer'(x)

    For linears, convolutions and transposed convolutions in one to three dimensions. ``nn.Identity``, inactive dropouts
    and changes of the shape that keep the axis of the channels whole may lie between, and a flatten before a linear.

    Skips:   an activation or another function between a layer and a norm after it; a first module whose result has
             other users, except for its shape; a norm in train mode or without running statistics; a module that is
             shared, tied, hooked, parametrized, of a subclass or called more than once; mixed dtypes, devices or
             requires_grad; an input of unknown rank, or where the channels of the norm are not the features of the
             linear; a norm with a shift before a transposed convolution, or one that pads with zeros; a norm with a
             mean of more than 16 standard deviations before a layer; an input that is changed in place between them;
             weights that would overflow or become subnormal.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the statistics of the norm are not kept.
    """

    norms: ClassVar[tuple[type[nn.Module], ...]] = _NORMS
    layers: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
    before: ClassVar[bool] = True

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        second = modules.called_module(graph_module, node)
        if not isinstance(second, (*self.norms, *self.layers)):
            return None
        path = _find_path(graph_module, node)
        first = modules.called_module(graph_module, path.nodes[0])
        if isinstance(first, self.layers) and isinstance(second, self.norms) and not path.flattened:
            norm_call, layer_call = node, path.nodes[0]
        elif self.before and isinstance(first, self.norms) and isinstance(second, self.layers):
            norm_call, layer_call = path.nodes[0], node
        else:
            return self._skip_function_between(graph_module, node, path.nodes[0])
        if reason := _find_problem(graph_module, norm_call, layer_call, path):
            return Skip(reason)
        space = 1
        if path.flattened and isinstance(first, _BatchNorm) and isinstance(second, nn.Linear):
            space = second.in_features // first.num_features
        fold = Fold((layer_call, norm_call), norm_call, layer_call, space)
        reason = folding.find_range_problem(layer_call.target, *_fold(graph_module, fold))
        return Skip(reason) if reason else fold

    def _skip_function_between(self, graph_module: GraphModule, norm: Node, function: Node) -> Skip | None:
        """Returns the reason if a function such as an activation lies between a layer and a norm, or None."""
        sources = function.all_input_nodes
        if len(sources) != 1 or not isinstance(modules.called_module(graph_module, norm), self.norms):
            return None
        if isinstance(modules.called_module(graph_module, function), self.norms):
            return None
        if not isinstance(modules.called_module(graph_module, sources[0]), self.layers):
            return None
        return Skip(f"{function.name} lies between {sources[0].target} and {norm.target}")

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        layer = folding.with_weights(*_fold(graph_module, match))
        modules.replace_module(graph_module, str(match.layer.target), layer)
        batch_norm.bypass(graph_module, match.norm)
        return [(match.layer, None)]


def _fold(graph_module: GraphModule, fold: Fold) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns the layer, and its weight and bias that include the norm, in float64."""
    norm, layer = (modules.called_module(graph_module, call) for call in (fold.norm, fold.layer))
    assert isinstance(norm, _BatchNorm) and isinstance(layer, nn.Linear | _ConvNd)
    scale, shift = batch_norm.scale_and_shift(norm)
    weight = layer.weight.detach().double()
    bias = torch.zeros((), dtype=weight.dtype) if layer.bias is None else layer.bias.detach().double()
    if fold.layer < fold.norm:
        return layer, weight * _over_outputs(layer, scale), bias * scale + shift
    scale, shift = (values.repeat_interleave(fold.space) for values in (scale, shift))
    return layer, weight * _over_inputs(layer, scale), bias + _apply_to_constant(layer, weight, shift)


@dataclass(frozen=True)
class _Path:
    """The nodes from one module call to the next.

    Attributes:
        nodes: Both calls, and the no-ops and changes of the shape between them.
        axis: The axis of the first result that becomes the channels of the second module; None if unknown.
        flattened: True if a flatten joins the channels with other axes.
    """

    nodes: list[Node]
    axis: int | None
    flattened: bool


def _find_path(graph_module: GraphModule, node: Node) -> _Path:
    """Returns the path to a module call from the closest node that is neither a no-op nor changes the shape."""
    nodes, flattened, x = [node], False, modules.sole_input(node)
    axis = None if x is None else _channel_axis(modules.called_module(graph_module, node), modules.dims(x))
    while x is not None:
        nodes.append(x)
        source = x.args[0] if x.args else None
        if (no_op := find_local_no_op(graph_module, x)) is not None:
            nodes += no_op.nodes[-2::-1]
            x = no_op.source
        elif isinstance(source, Node) and (source_axis := axes.find_source_axis(x, axis)) is not None:
            axis, x = source_axis, source
        elif isinstance(source, Node) and _flattens(graph_module, x):
            axis, flattened, x = None, True, source
        else:
            break
    return _Path(nodes[::-1], axis, flattened)


def _channel_axis(module: nn.Module | None, rank: int | None) -> int | None:
    """Returns the axis of a module's channels in its input and its result; None if unknown."""
    if isinstance(module, nn.Linear):
        return None if rank is None else rank - 1
    if isinstance(module, _ConvNd):
        return 1 if rank == module.weight.dim() else None
    return 1


def _flattens(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if a node joins all axes except the first."""
    module = modules.called_module(graph_module, node)
    if isinstance(module, nn.Flatten):
        plain = folding.find_plain_problem(module, nn.Flatten) is None
        return plain and (module.start_dim, module.end_dim) == (1, -1) and bool(node.args)
    return modules.operator_name(node) == "flatten" and node.args[1:] in ((1,), (1, -1)) and not node.kwargs


def _find_problem(graph_module: GraphModule, norm_call: Node, layer_call: Node, path: _Path) -> str | None:
    first, second = path.nodes[0], path.nodes[-1]
    for node, reader in itertools.pairwise(path.nodes):
        if any(user is not reader and not axes.reads_shape(user, node) for user in node.users):
            return f"the result of {node.target} has other users"
    norm, layer = (modules.called_module(graph_module, call) for call in (norm_call, layer_call))
    assert isinstance(norm, _BatchNorm) and isinstance(layer, nn.Linear | _ConvNd)
    if reason := batch_norm.find_fold_problem(graph_module, norm_call, layer_call):
        return reason
    if first is norm_call:
        if reason := batch_norm.find_mean_problem(norm):
            return f"{norm_call.target}: {reason}"
        x = modules.sole_input(first)
        if x is not None and (change := memory.find_change_between(graph_module, x, first, second)):
            return f"{x.name} is changed in place by {change.name} between {first.name} and {second.name}"
    if path.flattened:
        return None if isinstance(layer, nn.Linear) else f"{layer_call.target} follows a flatten and is not a linear"
    first_module = norm if first is norm_call else layer
    if reason := _find_axis_problem(first_module, norm, layer, path):
        return reason
    if first is norm_call and isinstance(layer, _ConvNd) and bool(batch_norm.scale_and_shift(norm)[1].any()):
        zeros = layer.padding_mode == "zeros" and layer.padding != "valid" and set(layer.padding) != {0}
        if zeros or isinstance(layer, _ConvTransposeNd):
            return f"{layer_call.target} pads with zeros, to which the shift of {norm_call.target} does not apply"
    return None


def _find_axis_problem(first: nn.Module, norm: _BatchNorm, layer: nn.Linear | _ConvNd, path: _Path) -> str | None:
    """Returns why the channels of the norm are not the features of the layer, or None."""
    call = path.nodes[0]
    rank, expected = modules.dims(call), 2 + len(layer.weight.shape[2:])
    if rank is None:  # nothing but no-ops lies between
        rank = _RANKS.get(type(norm))
        matches = rank == expected
    else:
        matches = path.axis is not None and path.axis == _channel_axis(first, rank)
    if matches:
        return None
    actual = "of unknown rank (trace with example inputs)" if rank is None else f"{rank}-dimensional"
    return f"the result of {call.target} is {actual}, and the channels of the norm may be another axis"


def _over_outputs(layer: nn.Linear | _ConvNd, factor: torch.Tensor) -> torch.Tensor:
    """Reshapes a factor per output feature for multiplication with the weight."""
    ones = (1,) * len(layer.weight.shape[2:])
    if isinstance(layer, _ConvTransposeNd):  # its weight is (in, out / groups, ...)
        repeats = layer.in_channels // layer.groups
        return factor.reshape(layer.groups, -1).repeat_interleave(repeats, 0).reshape(*layer.weight.shape[:2], *ones)
    return factor.reshape(-1, 1, *ones)


def _over_inputs(layer: nn.Linear | _ConvNd, factor: torch.Tensor) -> torch.Tensor:
    """Reshapes a factor per input feature for multiplication with the weight."""
    ones = (1,) * len(layer.weight.shape[2:])
    if isinstance(layer, nn.Linear):
        return factor
    if isinstance(layer, _ConvTransposeNd):
        return factor.reshape(-1, 1, *ones)
    repeats = layer.out_channels // layer.groups
    return factor.reshape(layer.groups, -1).repeat_interleave(repeats, 0).reshape(*layer.weight.shape[:2], *ones)


def _apply_to_constant(layer: nn.Linear | _ConvNd, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Returns the result of a layer, without bias, for a constant in each input feature."""
    if isinstance(layer, _ConvTransposeNd):  # matches only if the shift is zero
        return weight.new_zeros(layer.out_channels)
    return (weight * _over_inputs(layer, shift)).flatten(1).sum(1)
