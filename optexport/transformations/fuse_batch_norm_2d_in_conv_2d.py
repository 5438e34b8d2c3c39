"""A batch norm after a convolution becomes part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations import batch_norm, modules
from optexport.transformations.rule import Match, Rule, Skip


@dataclass(frozen=True)
class FuseBatchNorm2dInConv2d(Rule):
    """BatchNorm2d(Conv2d(x))  ->  Conv2d'(x)

    Skips:   a convolution whose result is used elsewhere too; a norm in train mode or without running statistics;
             either of them shared, tied, hooked, parametrized, of a subclass or called more than once; mixed dtypes.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the norm's statistics are gone.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if not isinstance(modules.called_module(graph_module, node), nn.BatchNorm2d):
            return None
        conv = modules.sole_input(node)
        if conv is None or not isinstance(modules.called_module(graph_module, conv), nn.Conv2d):
            return None
        if len(conv.users) > 1:
            return Skip(f"the result of {conv.target} is used elsewhere too")
        reason = batch_norm.why_not_foldable(graph_module, node, nn.BatchNorm2d, conv, nn.Conv2d)
        return Skip(reason) if reason else Match((conv, node))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        conv_call, norm_call = match.nodes
        conv = graph_module.get_submodule(str(conv_call.target))
        norm = graph_module.get_submodule(str(norm_call.target))
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        scale, shift = batch_norm.scale_and_shift(norm)
        fused: nn.Conv2d = modules.like(
            conv,
            nn.Conv2d,
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            bias=True,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            padding_mode=conv.padding_mode,
            dtype=conv.weight.dtype,
        )
        weight = conv.weight.detach().double() * scale.reshape(-1, 1, 1, 1)
        bias = shift if conv.bias is None else conv.bias.detach().double() * scale + shift
        batch_norm.set_parameters(fused, conv, weight, bias)
        modules.replace_module(graph_module, str(conv_call.target), fused)
        batch_norm.bypass(graph_module, norm_call)
        return [(conv_call, None)]
