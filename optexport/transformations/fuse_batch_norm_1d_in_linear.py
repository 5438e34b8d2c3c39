"""A batch norm before or after a linear becomes part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from optexport.transformations import batch_norm, memory, modules
from optexport.transformations.rule import Match, Rule, Skip


@dataclass(frozen=True)
class FuseBatchNorm1dInLinear(Rule):
    """BatchNorm1d(Linear(x))  ->  Linear'(x)        Linear(BatchNorm1d(x))  ->  Linear'(x)

    Skips:   an input that is not known to be 2-dimensional (of 3-dimensional ones the norm takes the middle axis and
             the linear the last); a first layer whose result is used elsewhere too; an input
             that is changed in place between norm and linear; a norm in train mode or without
             running statistics; either of them shared, tied, hooked, parametrized, of a subclass or called more than
             once; mixed dtypes.
    Exact:   to rounding (the weights are folded in float64 and rounded once).
    Inverse: none, because the norm's statistics are gone.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        first = modules.sole_input(node)
        if first is None:
            return None
        match modules.called_module(graph_module, first), modules.called_module(graph_module, node):
            case nn.Linear(), nn.BatchNorm1d():
                linear, norm = first, node
            case nn.BatchNorm1d(), nn.Linear():
                linear, norm = node, first
            case _:
                return None
        if len(first.users) > 1:
            return Skip(f"the result of {first.target} is used elsewhere too")
        if reason := batch_norm.why_not_foldable(graph_module, norm, nn.BatchNorm1d, linear, nn.Linear):
            return Skip(reason)
        x = modules.sole_input(first)
        if first is norm and x is not None and (change := memory.changed_between(graph_module, x, norm, linear)):
            return Skip(f"{x.name} is changed in place by {change.name} between {norm.name} and {linear.name}")
        if modules.dims(first) != 2:
            known = modules.dims(first)
            what = "of unknown rank: trace with example inputs" if known is None else f"{known}-dimensional"
            return Skip(f"the result of {first.target} is {what}")
        return Match((linear, norm))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        linear_call, norm_call = match.nodes
        linear = graph_module.get_submodule(str(linear_call.target))
        norm = graph_module.get_submodule(str(norm_call.target))
        assert isinstance(linear, nn.Linear) and isinstance(norm, nn.BatchNorm1d)
        scale, shift = batch_norm.scale_and_shift(norm)
        weight = linear.weight.detach().double()
        bias = weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach().double()
        if modules.sole_input(norm_call) is linear_call:
            weight, bias = weight * scale[:, None], bias * scale + shift
        else:
            weight, bias = weight * scale, bias + weight @ shift
        fused: nn.Linear = modules.like(
            linear, nn.Linear, linear.in_features, linear.out_features, bias=True, dtype=linear.weight.dtype
        )
        batch_norm.set_parameters(fused, linear, weight, bias)
        modules.replace_module(graph_module, str(linear_call.target), fused)
        batch_norm.bypass(graph_module, norm_call)
        return [(linear_call, None)]
