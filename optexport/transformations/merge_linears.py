"""MergeLinears: merges linears with the same input into one, and slices its result."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.errors import TransformationError
from optexport.transformations.analysis import folding, memory, modules, strides, usage
from optexport.transformations.rule import Match, ReversibleRule, Skip

# Attribute of a merged linear: the original linears, without weight and bias. A record cannot contain them, because it
# is plain data. As an attribute they are copied with the linear, including their own attributes and hooks.
_REPLACED = "_optexport_replaced"


@dataclass(frozen=True)
class Group(Match):
    """Linears that are always called together.

    Attributes:
        targets: Their qualified names.
        sites: Each shared input, with the calls in the order of `targets`.
    """

    targets: tuple[str, ...]
    sites: tuple[tuple[Node, tuple[Node, ...]], ...]


@dataclass(frozen=True)
class MergeLinears(ReversibleRule):
    """Merges linears with the same input.

    q = Q(x); k = K(x); v = V(x)  ->  qkv = QKV(x); q = qkv[..., :a]; k = qkv[..., a:b]; v = qkv[..., b:]

    For example queries, keys and values; gate and up projections; or the keys and values of all decoder layers. Linears
    that are called more than once are merged if they are always called together.

    Skips:   a linear that is shared, tied, hooked, parametrized, of a subclass or with other tensors, or that is called
             elsewhere without the others; linears that differ in dtype, device, requires_grad or mode; a weight or bias
             that is not contiguous; an input that is changed in place between them; a result that is viewed in a shape
             that requires contiguous memory, detached in place, or passed to code that is not PyTorch's own.
    Exact:   to rounding (a wider product may be summed in another order).
    Inverse: exact; the weights are slices of the merged weight, as new parameters. Linears without bias get none, and
             all have their attributes and their hooks on loading again.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Group | Skip | None:
        calls = [c for c in node.users if isinstance(modules.called_module(graph_module, c), nn.Linear)]
        if len(calls) < 2:
            return None
        reasons: list[str] = []
        families: dict[Any, list[str]] = defaultdict(list)
        for target in dict.fromkeys(str(call.target) for call in sorted(calls)):
            if reason := _find_problem(graph_module, target):
                reasons.append(f"{target}: {reason}")
                continue
            linear = _linear(graph_module, target)
            weight = linear.weight
            inputs = tuple(modules.sole_input(call) for call in usage.uses(graph_module).calls_of(target))
            families[inputs, weight.dtype, weight.device, weight.requires_grad, linear.training].append(target)
        for (inputs, *_), targets in families.items():
            if len(targets) > 1 and inputs and inputs[0] is node:
                result = _group(graph_module, tuple(targets), inputs)
                if isinstance(result, Group):
                    return result
                reasons.append(result.reason)
        if len(families) > 1 and not any(len(targets) > 1 for targets in families.values()):
            names = ", ".join(target for targets in families.values() for target in targets)
            reasons.append(f"{names}: the linears differ in inputs, dtype, device, requires_grad or mode")
        return Skip("; ".join(reasons)) if reasons else None

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Group)
        linears = [_linear(graph_module, target) for target in match.targets]
        widths = [linear.out_features for linear in linears]
        # The order is recorded once per parent: of targets with the same parent, for the first.
        one_per_parent = {target.rpartition(".")[0]: target for target in reversed(match.targets)}.values()
        order = {target: modules.children_order(graph_module, target) for target in one_per_parent}
        merged_target = _merged_name(graph_module, match.targets)
        merged = _merge(linears)
        parent, name = modules.parent_of(graph_module, merged_target)
        parent.add_module(name, merged)
        first = match.targets[0]
        modules.reorder_children(graph_module, merged_target, _insert_before(order[first], first, name))
        for target in match.targets:
            modules.remove_module(graph_module, target)
        record = {
            "targets": list(match.targets),
            "widths": widths,
            "shape": [merged.in_features, merged.out_features, merged.bias is not None],
            "biased": [linear.bias is not None for linear in linears],
            "order": order,
        }
        rewritten = []
        for x, calls in match.sites:
            with graph_module.graph.inserting_before(min(calls)):
                node = graph_module.graph.call_module(merged_target, (x,))
            modules.copy_meta(min(calls), node, min(calls), merged.out_features)
            keyword = [bool(call.kwargs) for call in calls]
            start = 0
            for call, width in zip(calls, widths, strict=True):
                call.op, call.target = "call_function", operator.getitem
                index: Any = (..., slice(start, start + width))
                call.args, call.kwargs = (node, index), {}
                start += width
            # Linears without features have equal slices; the ranks of their calls distinguish them.
            ranks = [calls.index(call) for call in sorted(calls)]
            rewritten.append((node, {**record, "keyword": keyword, "ranks": ranks}))
        return rewritten

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        merged_target = str(node.target)
        merged = _linear(graph_module, merged_target)
        shape = merged.in_features, merged.out_features, merged.bias is not None
        if shape != tuple(record["shape"]) or _REPLACED not in vars(merged):
            raise _undo_error(f"{merged_target} was changed after the merge", "Undo later changes first.")
        parent, first = modules.parent_of(graph_module, record["targets"][0])
        if first not in parent._modules:
            linears = _split(merged, record["widths"], record["biased"])
            for target, linear in zip(record["targets"], linears, strict=True):
                parent, name = modules.parent_of(graph_module, target)
                parent.add_module(name, linear)
        users = sorted(node.users)
        starts = [_slice_start(node, user) for user in users]
        if len(users) != len(record["targets"]):
            raise _undo_error(
                f"{node.name} has lost slices (expected {len(record['targets'])}, found {len(users)})",
                "Undo it before eliminating dead code.",
            )
        x = modules.sole_input(node)
        assert x is not None
        slices = [user for _, _, user in sorted(zip(starts, record["ranks"], users, strict=True))]
        for call, target, keyword in zip(slices, record["targets"], record["keyword"], strict=True):
            call.op, call.target = "call_module", target
            modules.call_on(call, x, keyword=keyword)
        graph_module.graph.erase_node(node)
        if not any(n.op == "call_module" and n.target == merged_target for n in graph_module.graph.nodes):
            modules.remove_module(graph_module, merged_target)
            for target, order in record["order"].items():
                modules.reorder_children(graph_module, target, order)


def _group(graph_module: GraphModule, targets: tuple[str, ...], inputs: tuple[Node, ...]) -> Group | Skip:
    uses = usage.uses(graph_module)
    by_input: dict[Node | None, dict[str, Node]] = defaultdict(dict)
    for target in targets:
        for call in uses.calls_of(target):
            by_input[modules.sole_input(call)][target] = call
    sites = tuple((x, tuple(by_input[x][target] for target in targets)) for x in inputs)
    for x, calls in sites:
        first, last = min(calls), max(calls)
        if change := memory.find_change_between(graph_module, x, first, last):
            return Skip(f"{x.name} is changed in place by {change.name} between {first.name} and {last.name}")
        for call, target in zip(calls, targets, strict=True):
            width = _linear(graph_module, target).out_features
            if (user := strides.needs_contiguous(graph_module, call, width)) is not None:
                return Skip(f"{user.name} may view the result of {call.name} in a shape that a slice does not allow")
    return Group(tuple(call for _, calls in sites for call in calls), targets, sites)


def _linear(graph_module: GraphModule, target: str) -> nn.Linear:
    linear = graph_module.get_submodule(target)
    assert isinstance(linear, nn.Linear)
    return linear


def _find_problem(graph_module: GraphModule, target: str) -> str | None:
    """Returns why a linear cannot be merged with any other, or None."""
    linear, uses = _linear(graph_module, target), usage.uses(graph_module)
    reason = folding.find_plain_problem(linear, nn.Linear)
    if reason := reason or folding.find_sharing_problem(graph_module, target, linear):
        return reason
    inputs = [modules.sole_input(call) for call in uses.calls_of(target)]
    if None in inputs:
        return "the module is not called with a single tensor"
    if len(set(inputs)) < len(inputs):
        return "the module is called twice with the same input"
    if linear.bias is not None and linear.bias.requires_grad != linear.weight.requires_grad:
        return "the weight and bias differ in requires_grad"
    if not all(strides.is_contiguous(parameter) for parameter in linear.parameters()):
        return "the weight or bias is not contiguous"
    return None


def _merge(linears: list[nn.Linear]) -> nn.Linear:
    first = linears[0]
    biased = any(linear.bias is not None for linear in linears)
    width = sum(linear.out_features for linear in linears)
    merged: nn.Linear = modules.like(first, nn.Linear, first.in_features, width, bias=biased)
    with torch.no_grad():
        weight = torch.cat(tuple(linear.weight for linear in linears))
        merged.weight = nn.Parameter(weight, requires_grad=first.weight.requires_grad)
        if biased:
            biases = tuple(
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
                for linear in linears
            )
            merged.bias = nn.Parameter(torch.cat(biases), requires_grad=first.weight.requires_grad)
    bare = tuple(modules.with_parameters(linear, weight=None, bias=None) for linear in linears)
    vars(merged)[_REPLACED] = bare
    return merged


def _split(merged: nn.Linear, widths: list[int], biased: list[bool]) -> list[nn.Linear]:
    linears = []
    weights = merged.weight.detach().split(widths)
    biases = (None,) * len(widths) if merged.bias is None else merged.bias.detach().split(widths)
    for bare, weight, bias, has_bias in zip(vars(merged)[_REPLACED], weights, biases, biased, strict=True):
        values = {"weight": weight.clone(memory_format=torch.contiguous_format)}
        if has_bias:
            values["bias"] = bias.clone()
        requires_grad = merged.weight.requires_grad
        parameters = {name: nn.Parameter(value, requires_grad=requires_grad) for name, value in values.items()}
        linears.append(modules.with_parameters(bare, **parameters).train(merged.training))
    return linears


def _merged_name(graph_module: GraphModule, targets: tuple[str, ...]) -> str:
    prefix, _, first = targets[0].rpartition(".")
    names = [target.rpartition(".")[2] for target in targets]
    parts = [*names, "merged"] if len(set(names)) == len(names) < 5 else [first, "and", str(len(names) - 1), "merged"]
    name = ".".join(filter(None, [prefix, "-".join(parts)]))
    parent, _ = modules.parent_of(graph_module, targets[0])
    while name.rpartition(".")[2] in parent._modules:
        name += "-"
    return name


def parts_in_name(name: str) -> list[str]:
    """Returns the linears that the name of a merged one lists.

    Empty for other names, and for names with a count.
    """
    prefix, _, last_part = name.rpartition(".")
    *parts, suffix = last_part.rstrip("-").split("-")
    if suffix != "merged" or len(parts) < 2 or (parts[1] == "and" and parts[2:] and parts[2].isdecimal()):
        return []
    return [f"{prefix}.{part}" if prefix else part for part in parts]


def _insert_before(order: list[str], target: str, name: str) -> list[str]:
    position = order.index(target.rpartition(".")[2])
    return [*order[:position], name, *order[position:]]


def _slice_start(node: Node, user: Node) -> int:
    if user.target is operator.getitem and user.args[0] is node:
        match user.args[1]:
            case (_, slice(start=int(start))):
                return start
    raise _undo_error(f"{user.name} uses {node.name} as a whole", "Undo later changes first.")


def _undo_error(message: str, hint: str) -> TransformationError:
    return TransformationError(message, location="MergeLinears", hint=hint)
