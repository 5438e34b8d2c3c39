"""Convolutions of one input whose results are summed become one convolution."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from optexport.transformations.analysis import batch_norm, folding, memory, modules, strides
from optexport.transformations.rule import Match, Rule, Skip

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RANKS = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}


@dataclass(frozen=True)
class Sum(Match):
    """Results of one input that are summed.

    Attributes:
        x: The input.
        terms: What is summed: calls of convolutions and norms on x, and x itself.
        largest: The call of the convolution whose kernel has room for all others.
        sums: The additions, last first.
    """

    x: Node
    terms: tuple[Node, ...]
    largest: Node
    sums: tuple[Node, ...]


@dataclass(frozen=True)
class MergeParallelConvs(Rule):
    """Conv_a(x) + Conv_b(x) + BatchNorm(x) + x  ->  Conv(x)

    In any order and number, with at least one convolution: the blocks of RepVGG, once the norm after each convolution
    is part of it. Smaller kernels stand in the middle of the largest one; x itself is a kernel of a single 1 in each
    channel, and a norm outside of training one of its scale. A sum with other terms is left alone, but for a part in
    brackets of its own that has none.

    Skips:   a term that is used elsewhere too or is in the sum twice; kernels of which none has room for all others,
             since that were more work; kernels whose middles do not meet, as their padding would have it; convolutions
             that differ in stride, dilation, groups, channels, dtype, device, requires_grad, mode or memory format,
             that are channels_last and added to anything but convolutions, that do not pad with zeros, or that are
             shared, tied, hooked, parametrized, of a subclass or called more than once; a norm in train mode, without
             running statistics or with a mean of more than 16 standard deviations; x itself or its norm where the
             convolution has a stride or as many outputs as inputs it has not, or where the sum is viewed in a shape
             that only contiguous memory can take and x is not known to be contiguous; an x that is changed in place
             between the terms; a kernel that would overflow or become subnormal.
    Exact:   to rounding (the kernels are summed in float64 and rounded once).
    Inverse: none, because the sum of the kernels is rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Sum | Skip | None:
        found = _find(graph_module, node)
        if found is None:
            return None
        for around in _sums_around(node):
            other = _find(graph_module, around)
            if isinstance(other, Sum) or (isinstance(other, Skip) and isinstance(found, Skip)):
                return None  # it is said there
        return found

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Sum)
        merged = folding.with_weights(*_summed(graph_module, match))
        modules.replace_module(graph_module, str(match.largest.target), merged)
        match.sums[0].replace_all_uses_with(match.largest)
        for sum_ in match.sums:
            graph_module.graph.erase_node(sum_)
        for term in match.terms:
            if term not in (match.x, match.largest):
                graph_module.graph.erase_node(term)
                modules.remove_module(graph_module, str(term.target))
        return [(match.largest, None)]


def _summed(graph_module: GraphModule, found: Sum) -> tuple[_ConvNd, torch.Tensor, torch.Tensor | None]:
    """The convolution that stays, and the weight and bias with which it does the work of all, in float64."""
    largest = _conv(graph_module, found.largest)
    weight = torch.zeros_like(largest.weight, dtype=torch.float64)
    bias = weight.new_zeros(largest.out_channels)
    biased = False
    for term in found.terms:
        layer = None if term is found.x else modules.called_module(graph_module, term)
        shift: torch.Tensor | None = None
        if isinstance(layer, _ConvNd):
            kernel, shift = layer.weight.detach().double(), layer.bias
        elif isinstance(layer, _BatchNorm):
            scale, shift = batch_norm.scale_and_shift(layer)
            kernel = _diagonal(largest, scale)
        else:
            kernel = _diagonal(largest, torch.ones_like(bias))
        starts = [(size - own) // 2 for size, own in zip(weight.shape[2:], kernel.shape[2:], strict=True)]
        middle = (slice(start, start + own) for start, own in zip(starts, kernel.shape[2:], strict=True))
        weight[(slice(None), slice(None), *middle)] += kernel
        if shift is not None:
            bias, biased = bias + shift.detach().double(), True
    return largest, weight, bias if biased else None


def _is_sum(node: Node) -> bool:
    return node.target is operator.add and len(node.args) == 2 and not node.kwargs


def _sums_around(node: Node) -> Iterator[Node]:
    """The additions that a sum is an operand of, and of nothing else, from the inside out."""
    while len(node.users) == 1 and _is_sum(user := next(iter(node.users))) and user.args[0] is not user.args[1]:
        yield user
        node = user


def _flatten(graph_module: GraphModule, node: Node) -> tuple[Node, list[Node], list[Node]] | None:
    """The one input of all layers in a sum, its terms, and the additions that make it, last first.

    None where something else is in it. A sum may have very many terms, so what is no sum again is looked at first.
    """
    terms: list[Node] = []
    sums, ahead = [], [node]
    inputs: set[Node | None] = set()
    while ahead:
        term = ahead.pop()
        if not isinstance(term, Node):
            return None
        if term is node or _is_inner(term):
            sums.append(term)
            ahead += sorted(term.args, key=lambda argument: not _is_inner(argument))  # type: ignore[arg-type]
            continue
        layer = modules.called_module(graph_module, term)
        its = {term, modules.sole_input(term) if isinstance(layer, (*_CONVOLUTIONS, *_NORMS)) else term}
        inputs = inputs & its if terms else its
        if not inputs:
            return None
        terms.append(term)
    convs = [term for term in sorted(terms) if isinstance(modules.called_module(graph_module, term), _CONVOLUTIONS)]
    x = next((x for conv in convs if (x := modules.sole_input(conv)) in inputs), None)
    return None if x is None else (x, sorted(terms), sums)


def _is_inner(argument: Any) -> bool:
    return isinstance(argument, Node) and _is_sum(argument) and any(_sums_around(argument))


def _find(graph_module: GraphModule, node: Node) -> Sum | Skip | None:
    flat = _flatten(graph_module, node) if _is_sum(node) else None
    if flat is None:
        return None
    x, terms, sums = flat
    calls = [term for term in terms if term is not x]
    if reason := _why_not_alone(graph_module, calls) or _why_different(graph_module, calls, len(terms)):
        return Skip(reason)
    if change := memory.changed_between(graph_module, x, min(calls), node):
        return Skip(f"{x.name} is changed in place by {change.name} between {min(calls).name} and {node.name}")
    kernels = [call for call in calls if isinstance(modules.called_module(graph_module, call), _CONVOLUTIONS)]
    largest = _largest(graph_module, kernels)
    if isinstance(largest, Skip):
        return largest
    if reason := _why_not_in(graph_module, terms, x, largest):
        return Skip(reason)
    # A sum with x has its axes in the order in memory that x has them in; what layers give has not.
    if x in terms and not _is_contiguous(x) and (user := strides.needs_contiguous(graph_module, node, None)):
        return Skip(f"{user.name} views the sum, or may, in a shape that {x.name} may allow and a convolution not")
    found = Sum((*calls, *reversed(sums)), x, tuple(terms), largest, tuple(sums))
    reason = folding.why_not_held(largest.target, *_summed(graph_module, found))
    return Skip(reason) if reason else found


def _is_contiguous(x: Node) -> bool:
    value = x.meta.get("val")
    return isinstance(value, torch.Tensor) and strides.is_contiguous(value)


def _why_not_alone(graph_module: GraphModule, calls: list[Node]) -> str | None:
    """Why one of the layers cannot be looked at by itself; None if all can."""
    seen: set[Node] = set()
    for call in calls:
        if reason := folding.why_not_replaceable(graph_module, call):
            return reason
        if len(call.users) > 1:
            return f"the result of {call.target} is used elsewhere too"
        if call in seen:
            return f"the result of {call.target} is added to itself"
        seen.add(call)
        layer = modules.called_module(graph_module, call)
        norm = layer if isinstance(layer, _BatchNorm) else None
        if norm and (reason := batch_norm.why_not_affine(norm) or batch_norm.why_not_centred(norm)):
            return f"{call.target}: {reason}"
    return None


def _why_different(graph_module: GraphModule, calls: list[Node], terms: int) -> str | None:
    layers = [modules.called_module(graph_module, call) for call in calls]
    convs = [layer for layer in layers if isinstance(layer, _ConvNd)]
    names = ", ".join(str(call.target) for call in calls)
    tensors = [tensor for layer in layers if layer is not None for tensor in layer.state_dict(keep_vars=True).values()]
    # Of a norm, what counts its batches is a whole number.
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    if len({(number.dtype, number.device) for number in numbers}) > 1:
        return f"{names}: they differ in dtype or device"
    if len({parameter.requires_grad for parameter in parameters}) > 1:
        return f"{names}: they differ in requires_grad"
    if len({conv.training for conv in convs}) > 1:
        return f"{names}: they differ in mode"
    if len({(type(conv), conv.in_channels, conv.out_channels, conv.groups, conv.stride) for conv in convs}) > 1:
        return f"{names}: they differ in channels, groups or stride"
    formats = {_memory_format(conv.weight) for conv in convs}
    if None in formats:
        return f"{names}: a weight of theirs is neither contiguous nor channels_last"
    # What a convolution gives is in the memory format of its weight; what is added to that need not be.
    if len(formats) > 1 or (formats != {torch.contiguous_format} and len(convs) < terms):
        return f"{names}: they differ in memory format, or what is added to them may"
    if any(conv.padding_mode != "zeros" for conv in convs):
        return f"{names}: not all of them pad with zeros"
    return None


def _memory_format(weight: torch.Tensor) -> torch.memory_format | None:
    """The memory format that a convolution takes a weight to be in; None where it is in none."""
    found = suggest_memory_format(weight)
    return found if weight.is_contiguous(memory_format=found) else None


def _largest(graph_module: GraphModule, calls: list[Node]) -> Node | Skip:
    """The call of the convolution whose kernel is the largest along every axis."""
    kernels = [tuple(_conv(graph_module, call).kernel_size) for call in calls]
    hull = tuple(max(sizes) for sizes in zip(*kernels, strict=True))
    if hull in kernels:
        return calls[kernels.index(hull)]
    before, after = sum(math.prod(kernel) for kernel in kernels), math.prod(hull)
    size = "x".join(map(str, hull))
    names = ", ".join(str(call.target) for call in calls)
    return Skip(f"{names}: a kernel of {size} would take {after} products where theirs take {before}")


def _why_not_in(graph_module: GraphModule, terms: list[Node], x: Node, largest: Node) -> str | None:
    """Why a term has no place in the largest kernel; None if all have."""
    conv = _conv(graph_module, largest)
    rank = 2 + len(conv.kernel_size)
    for term in terms:
        layer = None if term is x else modules.called_module(graph_module, term)
        if isinstance(layer, _ConvNd):
            if not _in_the_middle(layer.kernel_size, _padding(layer), layer.dilation, conv):
                return f"the middle of {term.target} is not that of {largest.target}, or its dilation another"
            continue
        name = x.name if term is x else term.target
        if conv.in_channels != conv.out_channels or set(conv.stride) != {1}:
            return f"{name} is no convolution, and {largest.target} has a stride, or other outputs than inputs"
        if not _in_the_middle((1,) * (rank - 2), (0,) * (rank - 2), conv.dilation, conv):
            return f"{largest.target} does not keep each position where it is, as {name} does"
        if isinstance(layer, _BatchNorm) and (_RANKS.get(type(layer)) or modules.dims(x)) != rank:
            return f"the input of {name} is not known to have {rank} dimensions"
    return None


def _in_the_middle(
    kernel: tuple[int, ...], padding: tuple[int, ...] | None, dilation: tuple[int, ...], conv: _ConvNd
) -> bool:
    """Whether a kernel reads the same as one in the middle of a larger one, with zeros around it."""
    its_padding = _padding(conv)
    if padding is None or its_padding is None:
        return False
    axes = zip(kernel, padding, dilation, conv.kernel_size, its_padding, conv.dilation, strict=True)
    return all(
        (larger - size) % 2 == 0
        and its_pad - pad == (larger - size) // 2 * its_gap
        and (size == 1 or gap == its_gap)  # of a single number there is no dilation
        for size, pad, gap, larger, its_pad, its_gap in axes
    )


def _padding(conv: _ConvNd) -> tuple[int, ...] | None:
    """The zeros at either end of each axis; None where the two differ."""
    ends = conv._reversed_padding_repeated_twice[::-1]
    if conv.padding == "valid":
        return (0,) * len(conv.kernel_size)
    if isinstance(conv.padding, str):
        return tuple(ends[::2]) if ends[::2] == ends[1::2] else None
    return tuple(conv.padding)


def _conv(graph_module: GraphModule, call: Node) -> _ConvNd:
    conv = modules.called_module(graph_module, call)
    assert isinstance(conv, _ConvNd)
    return conv


def _diagonal(conv: _ConvNd, scale: torch.Tensor) -> torch.Tensor:
    """The kernel of size 1 that multiplies each channel by a number, in the groups of a convolution."""
    kernel = scale.new_zeros(conv.out_channels, conv.in_channels // conv.groups)
    channels = torch.arange(conv.out_channels, device=scale.device)
    kernel[channels, channels % kernel.shape[1]] = scale
    return kernel.reshape(*kernel.shape, *(1 for _ in conv.kernel_size))
