"""A batch norm becomes part of the linear or the convolution before or after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from optexport.transformations.analysis import batch_norm, folding, memory, modules
from optexport.transformations.remove_no_ops import handed_through
from optexport.transformations.rule import Match, Rule, Skip

_NORMS: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS: tuple[type[_ConvNd], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: tuple[type[_ConvNd], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RANKS = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}


@dataclass(frozen=True)
class Fold(Match):
    """A norm beside a layer.

    Attributes:
        norm: The call of the norm.
        layer: The call of the layer.
        space: Of a norm before a flatten, how many features each of its channels becomes; else 1.
    """

    norm: Node
    layer: Node
    space: int


@dataclass(frozen=True)
class FuseBatchNorm(Rule):
    """BatchNorm(Layer(x))  ->  Layer'(x)        Layer(BatchNorm(x))  ->  Layer'(x)

    For linears, convolutions and transposed convolutions in one to three dimensions; an ``nn.Identity`` or a dropout
    outside of training may stand between, and before a linear a flatten.

    Skips:   a first of the two whose result is used elsewhere too; a norm in train mode or without running statistics;
             either of them shared, tied, hooked, parametrized, of a subclass or called more than once; mixed dtypes,
             devices or requires_grad; an input of unknown rank, or of one where the channels of the norm are not the
             features of the linear; before a convolution that pads with zeros, or a transposed one, a norm that shifts;
             before any layer a norm with a mean of more than 16 standard deviations; an input that is changed in place
             between them; weights that would overflow or become subnormal.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the norm's statistics are gone.
    """

    norms: ClassVar[tuple[type[nn.Module], ...]] = _NORMS
    layers: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
    before: ClassVar[bool] = True

    def match(self, graph_module: GraphModule, node: Node) -> Fold | Skip | None:
        second = modules.called_module(graph_module, node)
        if not isinstance(second, (*self.norms, *self.layers)):
            return None
        start, between = _first(graph_module, node)
        if start is None:
            return None
        first = modules.called_module(graph_module, start)
        flattened = any(_flattens(graph_module, other) for other in between)
        if isinstance(first, self.layers) and isinstance(second, self.norms) and not flattened:
            norm_call, layer_call = node, start
        elif self.before and isinstance(first, self.norms) and isinstance(second, self.layers):
            norm_call, layer_call = start, node
        else:
            return None
        if reason := _why_not(graph_module, norm_call, layer_call, [start, *reversed(between), node], flattened):
            return Skip(reason)
        space = 1
        if flattened and isinstance(first, _BatchNorm) and isinstance(second, nn.Linear):
            space = second.in_features // first.num_features
        fold = Fold((layer_call, norm_call), norm_call, layer_call, space)
        reason = folding.why_not_held(layer_call.target, *_folded(graph_module, fold))
        return Skip(reason) if reason else fold

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Fold)
        layer = folding.with_weights(*_folded(graph_module, match))
        modules.replace_module(graph_module, str(match.layer.target), layer)
        batch_norm.bypass(graph_module, match.norm)
        return [(match.layer, None)]


def _folded(graph_module: GraphModule, fold: Fold) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The layer, and the weight and bias with which it does the work of the norm too, in float64."""
    norm, layer = (modules.called_module(graph_module, call) for call in (fold.norm, fold.layer))
    assert isinstance(norm, _BatchNorm) and isinstance(layer, nn.Linear | _ConvNd)
    scale, shift = batch_norm.scale_and_shift(norm)
    weight = layer.weight.detach().double()
    own = torch.zeros((), dtype=weight.dtype) if layer.bias is None else layer.bias.detach().double()
    if fold.layer < fold.norm:
        return layer, weight * _over_outputs(layer, scale), own * scale + shift
    scale, shift = (values.repeat_interleave(fold.space) for values in (scale, shift))
    return layer, weight * _over_inputs(layer, scale), own + _through(layer, weight, shift)


def _first(graph_module: GraphModule, node: Node) -> tuple[Node | None, list[Node]]:
    """What a module's input comes from, and what hands it on unchanged, or flattened, on the way."""
    between: list[Node] = []
    x = modules.sole_input(node)
    while x is not None:
        if _flattens(graph_module, x) and isinstance(source := x.args[0], Node):
            between, x = [*between, x], source
        elif (found := handed_through(graph_module, x)) is not None:
            between, x = [*between, *reversed(found.nodes)], found.source
        else:
            break
    return x, between


def _flattens(graph_module: GraphModule, node: Node) -> bool:
    """Whether a node joins all axes but the first."""
    module = modules.called_module(graph_module, node)
    if isinstance(module, nn.Flatten):
        plain = folding.why_not_plain(module, nn.Flatten) is None
        return plain and (module.start_dim, module.end_dim) == (1, -1) and bool(node.args)
    return modules.operator_name(node) == "flatten" and node.args[1:] in ((1,), (1, -1)) and not node.kwargs


def _why_not(
    graph_module: GraphModule, norm_call: Node, layer_call: Node, chain: list[Node], flattened: bool
) -> str | None:
    first, second = chain[0], chain[-1]
    for node in chain[:-1]:
        if len(node.users) > 1:
            return f"the result of {node.target} is used elsewhere too"
    norm, layer = (modules.called_module(graph_module, call) for call in (norm_call, layer_call))
    assert isinstance(norm, _BatchNorm) and isinstance(layer, nn.Linear | _ConvNd)
    if reason := batch_norm.why_not_foldable(graph_module, norm_call, layer_call):
        return reason
    if first is norm_call and (reason := batch_norm.why_not_centred(norm)):
        return f"{norm_call.target}: {reason}"
    x = modules.sole_input(first)
    if first is norm_call and x is not None and (change := memory.changed_between(graph_module, x, first, second)):
        return f"{x.name} is changed in place by {change.name} between {first.name} and {second.name}"
    rank = _RANKS.get(type(norm)) or modules.dims(first)
    if flattened:
        return None if isinstance(layer, nn.Linear) else f"{layer_call.target} is no linear after a flatten"
    if rank != 2 + len(layer.weight.shape[2:]):
        what = "of unknown rank: trace with example inputs" if rank is None else f"{rank}-dimensional"
        return f"the result of {first.target} is {what}"
    if first is norm_call and isinstance(layer, _ConvNd) and bool(batch_norm.scale_and_shift(norm)[1].any()):
        zeros = layer.padding_mode == "zeros" and layer.padding != "valid" and set(layer.padding) != {0}
        if zeros or isinstance(layer, _ConvTransposeNd):
            return f"{layer_call.target} pads with zeros, which the shift of {norm_call.target} would not reach"
    return None


def _over_outputs(layer: nn.Linear | _ConvNd, factor: torch.Tensor) -> torch.Tensor:
    """A factor for every output feature, in the shape in which it multiplies the weight."""
    ones = (1,) * len(layer.weight.shape[2:])
    if isinstance(layer, _ConvTransposeNd):  # whose weight is (in, out / groups, ...)
        each = layer.in_channels // layer.groups
        return factor.reshape(layer.groups, -1).repeat_interleave(each, 0).reshape(*layer.weight.shape[:2], *ones)
    return factor.reshape(-1, 1, *ones)


def _over_inputs(layer: nn.Linear | _ConvNd, factor: torch.Tensor) -> torch.Tensor:
    """A factor for every input feature, in the shape in which it multiplies the weight."""
    ones = (1,) * len(layer.weight.shape[2:])
    if isinstance(layer, nn.Linear):
        return factor
    if isinstance(layer, _ConvTransposeNd):
        return factor.reshape(-1, 1, *ones)
    each = layer.out_channels // layer.groups
    return factor.reshape(layer.groups, -1).repeat_interleave(each, 0).reshape(*layer.weight.shape[:2], *ones)


def _through(layer: nn.Linear | _ConvNd, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """What a layer makes of a constant in every input feature."""
    if isinstance(layer, _ConvTransposeNd):  # which is only matched where the shift is zero
        return weight.new_zeros(layer.out_channels)
    return (weight * _over_inputs(layer, shift)).flatten(1).sum(1)
