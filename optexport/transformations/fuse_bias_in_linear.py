"""FuseBiasInLinear: converts the bias of a linear to a column of its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from optexport.transformations.analysis import folding, modules, strides, usage
from optexport.transformations.rule import Match, ReversibleRule, Skip


@dataclass(frozen=True)
class FuseBiasInLinear(ReversibleRule):
    """Converts the bias of a linear to a column of its weight.

    x @ W.T + b  ->  [x, 1] @ [W, b].T

    Every call then copies its input, so this is rarely faster. The rule is in no preset.

    Skips:   a linear that is shared, tied, hooked, parametrized, of a subclass or with other tensors; weight and bias
             that differ in dtype, device or requires_grad, or are not contiguous; a call without a single tensor.
    Exact:   to rounding (the bias is summed with the products).
    Inverse: exact; weight and bias are split again, as new parameters. The linear keeps its attributes.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        linear = modules.called_module(graph_module, node)
        if not isinstance(linear, nn.Linear) or linear.bias is None:
            return None
        uses = usage.uses(graph_module)
        target = str(node.target)
        reason = folding.find_plain_problem(linear, nn.Linear)
        if reason := reason or folding.find_sharing_problem(graph_module, target, linear):
            return Skip(f"{target}: {reason}")
        w, b = linear.weight, linear.bias
        if (w.dtype, w.device, w.requires_grad) != (b.dtype, b.device, b.requires_grad):
            return Skip(f"{target}: weight and bias differ in dtype, device or requires_grad")
        if not strides.is_contiguous(w) or not strides.is_contiguous(b):
            return Skip(f"{target}: the weight or bias is not contiguous")
        calls = uses.calls_of(target)
        if any(modules.sole_input(call) is None for call in calls):
            return Skip(f"{target}: the module is not called with a single tensor")
        return Match(tuple(calls))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        target = str(match.nodes[0].target)
        linear = graph_module.get_submodule(target)
        assert isinstance(linear, nn.Linear)
        weight = torch.cat([linear.weight.detach(), linear.bias.detach()[:, None]], dim=1)
        new = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        fused = modules.with_parameters(linear, weight=new, bias=None)
        fused.in_features += 1
        modules.replace_module(graph_module, target, fused)
        rewritten = []
        for call in match.nodes:
            x = modules.sole_input(call)
            assert x is not None
            with graph_module.graph.inserting_before(call):
                padded = graph_module.graph.call_function(F.pad, (x, (0, 1)), {"value": 1.0})
            modules.copy_meta(call, padded, x, linear.in_features + 1)
            rewritten.append((call, {"keyword": bool(call.kwargs)}))
            modules.call_on(call, padded, keyword=False)
        return rewritten

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        padded = node.args[0]
        assert isinstance(padded, Node)
        x = padded.args[0]
        assert isinstance(x, Node)
        modules.call_on(node, x, keyword=record["keyword"])
        graph_module.graph.erase_node(padded)
        fused = graph_module.get_submodule(str(node.target))
        assert isinstance(fused, nn.Linear)
        if fused.bias is not None:  # already restored for another call of this linear
            return
        weight, bias = (
            nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=fused.weight.requires_grad)
            for part in (fused.weight.detach()[:, :-1], fused.weight.detach()[:, -1])
        )
        linear = modules.with_parameters(fused, weight=weight, bias=bias)
        linear.in_features -= 1
        modules.replace_module(graph_module, str(node.target), linear)
