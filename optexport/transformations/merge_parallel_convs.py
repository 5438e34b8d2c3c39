"""MergeParallelConvs: merges convolutions with the same input whose results are added."""

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
    """A sum of results with the same input.

    Attributes:
        x: The input.
        terms: The terms: calls of convolutions and norms, and x itself.
        largest: The call of the convolution whose kernel covers all others.
        sums: The additions, last first.
    """

    x: Node
    terms: tuple[Node, ...]
    largest: Node
    sums: tuple[Node, ...]


@dataclass(frozen=True)
class MergeParallelConvs(Rule):
    """Merges convolutions with the same input whose results are added.

    Conv_a(x) + Conv_b(x) + BatchNorm(x) + x  ->  Conv(x)

    In any order and number, with at least one convolution. For example the blocks of RepVGG, after their norms were
    folded. Smaller kernels are placed in the middle of the largest one. x itself is a kernel of size 1 with a 1 for
    each channel, and a norm one with its scale. Sums with other terms do not match, but parts in brackets may.

    Skips:   a term with other users, or that occurs twice; kernels without one that covers all others, as that would
             be slower; kernels with other centers because of their padding; convolutions that differ in stride,
             dilation, groups, channels, dtype, device, requires_grad, mode or memory format; channels_last convolutions
             with other terms; convolutions that do not pad with zeros, or that are shared, tied, hooked, parametrized,
             of a subclass or called more than once; a norm in train mode, without running statistics or with a mean of
             more than 16 standard deviations; x or a norm if the convolution has a stride, or different numbers of
             inputs and outputs; x if the sum is viewed in a shape that requires contiguous memory; an x that is changed
             in place between the terms; weights that would overflow or become subnormal.
    Exact:   to rounding (the kernels are added in float64 and rounded once).
    Inverse: none, because the sum of the kernels is rounded.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Sum | Skip | None:
        result = _find_sum(graph_module, node)
        if result is None:
            return None
        for outer in _outer_sums(node):
            outer_result = _find_sum(graph_module, outer)
            if isinstance(outer_result, Sum) or (isinstance(outer_result, Skip) and isinstance(result, Skip)):
                return None  # the outer sum reports it
        return result

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Sum)
        merged = folding.with_weights(*_merged_weights(graph_module, match))
        modules.replace_module(graph_module, str(match.largest.target), merged)
        match.sums[0].replace_all_uses_with(match.largest)
        for sum_ in match.sums:
            graph_module.graph.erase_node(sum_)
        for term in match.terms:
            if term not in (match.x, match.largest):
                graph_module.graph.erase_node(term)
                modules.remove_module(graph_module, str(term.target))
        return [(match.largest, None)]


def _merged_weights(graph_module: GraphModule, match: Sum) -> tuple[_ConvNd, torch.Tensor, torch.Tensor | None]:
    """Returns the convolution that stays, and its weight and bias after the merge, in float64."""
    largest = _conv(graph_module, match.largest)
    weight = torch.zeros_like(largest.weight, dtype=torch.float64)
    bias = weight.new_zeros(largest.out_channels)
    biased = False
    for term in match.terms:
        layer = None if term is match.x else modules.called_module(graph_module, term)
        shift: torch.Tensor | None = None
        if isinstance(layer, _ConvNd):
            kernel, shift = layer.weight.detach().double(), layer.bias
        elif isinstance(layer, _BatchNorm):
            scale, shift = batch_norm.scale_and_shift(layer)
            kernel = _diagonal(largest, scale)
        else:
            kernel = _diagonal(largest, torch.ones_like(bias))
        starts = [(total - size) // 2 for total, size in zip(weight.shape[2:], kernel.shape[2:], strict=True)]
        middle = (slice(start, start + size) for start, size in zip(starts, kernel.shape[2:], strict=True))
        weight[(slice(None), slice(None), *middle)] += kernel
        if shift is not None:
            bias, biased = bias + shift.detach().double(), True
    return largest, weight, bias if biased else None


def _is_sum(node: Node) -> bool:
    return node.target is operator.add and len(node.args) == 2 and not node.kwargs


def _outer_sums(node: Node) -> Iterator[Node]:
    """Yields the additions that are the only user of a sum, from the inside out."""
    while len(node.users) == 1 and _is_sum(user := next(iter(node.users))) and user.args[0] is not user.args[1]:
        yield user
        node = user


def _flatten(graph_module: GraphModule, node: Node) -> tuple[Node, list[Node], list[Node]] | None:
    """Returns the input of all layers in a sum, its terms, and its additions (last first).

    Returns None if the sum has another term. A sum may have very many terms, so other terms are visited first.
    """
    terms: list[Node] = []
    sums, ahead = [], [node]
    inputs: set[Node | None] = set()
    while ahead:
        term = ahead.pop()
        if not isinstance(term, Node):
            return None
        if term is node or _is_inner_sum(term):
            sums.append(term)
            ahead += sorted(term.args, key=lambda argument: not _is_inner_sum(argument))  # type: ignore[arg-type]
            continue
        layer = modules.called_module(graph_module, term)
        candidates = {term, modules.sole_input(term) if isinstance(layer, (*_CONVOLUTIONS, *_NORMS)) else term}
        inputs = inputs & candidates if terms else candidates
        if not inputs:
            return None
        terms.append(term)
    convs = [term for term in sorted(terms) if isinstance(modules.called_module(graph_module, term), _CONVOLUTIONS)]
    x = next((x for conv in convs if (x := modules.sole_input(conv)) in inputs), None)
    return None if x is None else (x, sorted(terms), sums)


def _is_inner_sum(argument: Any) -> bool:
    return isinstance(argument, Node) and _is_sum(argument) and any(_outer_sums(argument))


def _find_sum(graph_module: GraphModule, node: Node) -> Sum | Skip | None:
    flat = _flatten(graph_module, node) if _is_sum(node) else None
    if flat is None:
        return None
    x, terms, sums = flat
    calls = [term for term in terms if term is not x]
    reason = _find_call_problem(graph_module, calls) or _find_difference(graph_module, calls, len(terms))
    if reason:
        return Skip(reason)
    if change := memory.find_change_between(graph_module, x, min(calls), node):
        return Skip(f"{x.name} is changed in place by {change.name} between {min(calls).name} and {node.name}")
    convs = [call for call in calls if isinstance(modules.called_module(graph_module, call), _CONVOLUTIONS)]
    largest = _find_largest(graph_module, convs)
    if isinstance(largest, Skip):
        return largest
    if reason := _find_kernel_problem(graph_module, terms, x, largest):
        return Skip(reason)
    # A sum with x may have the memory layout of x; the result of a convolution does not.
    if x in terms and not _is_contiguous(x) and (user := strides.needs_contiguous(graph_module, node, None)):
        return Skip(f"{user.name} may view the sum in a shape that the layout of {x.name} allows but not a convolution")
    result = Sum((*calls, *reversed(sums)), x, tuple(terms), largest, tuple(sums))
    reason = folding.find_range_problem(largest.target, *_merged_weights(graph_module, result))
    return Skip(reason) if reason else result


def _is_contiguous(x: Node) -> bool:
    value = x.meta.get("val")
    return isinstance(value, torch.Tensor) and strides.is_contiguous(value)


def _find_call_problem(graph_module: GraphModule, calls: list[Node]) -> str | None:
    """Returns why one of the layers cannot be merged with any other, or None."""
    visited: set[Node] = set()
    for call in calls:
        if reason := folding.find_replacement_problem(graph_module, call):
            return reason
        if len(call.users) > 1:
            return f"the result of {call.target} has other users"
        if call in visited:
            return f"the result of {call.target} is added to itself"
        visited.add(call)
        layer = modules.called_module(graph_module, call)
        norm = layer if isinstance(layer, _BatchNorm) else None
        if norm and (reason := batch_norm.find_affine_problem(norm) or batch_norm.find_mean_problem(norm)):
            return f"{call.target}: {reason}"
    return None


def _find_difference(graph_module: GraphModule, calls: list[Node], term_count: int) -> str | None:
    """Returns a property in which layers differ that must be equal, or None."""
    layers = [modules.called_module(graph_module, call) for call in calls]
    convs = [layer for layer in layers if isinstance(layer, _ConvNd)]
    names = ", ".join(str(call.target) for call in calls)
    tensors = [tensor for layer in layers if layer is not None for tensor in layer.state_dict(keep_vars=True).values()]
    # The counter of batches in a norm is an integer.
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    if len({(number.dtype, number.device) for number in numbers}) > 1:
        return f"{names}: the layers differ in dtype or device"
    if len({parameter.requires_grad for parameter in parameters}) > 1:
        return f"{names}: the layers differ in requires_grad"
    if len({conv.training for conv in convs}) > 1:
        return f"{names}: the convolutions differ in mode"
    if len({(type(conv), conv.in_channels, conv.out_channels, conv.groups, conv.stride) for conv in convs}) > 1:
        return f"{names}: the convolutions differ in channels, groups or stride"
    formats = {_find_memory_format(conv.weight) for conv in convs}
    if None in formats:
        return f"{names}: a weight is neither contiguous nor channels_last"
    # The result of a convolution has the memory format of its weight; other terms may have another one.
    if len(formats) > 1 or (formats != {torch.contiguous_format} and len(convs) < term_count):
        return f"{names}: the convolutions differ in memory format from each other or from other terms"
    if any(conv.padding_mode != "zeros" for conv in convs):
        return f"{names}: not all convolutions pad with zeros"
    return None


def _find_memory_format(weight: torch.Tensor) -> torch.memory_format | None:
    """Returns the memory format of a weight, or None if it has none."""
    memory_format = suggest_memory_format(weight)
    return memory_format if weight.is_contiguous(memory_format=memory_format) else None


def _find_largest(graph_module: GraphModule, calls: list[Node]) -> Node | Skip:
    """Returns the call of the convolution whose kernel is the largest along every axis."""
    kernels = [tuple(_conv(graph_module, call).kernel_size) for call in calls]
    hull = tuple(max(sizes) for sizes in zip(*kernels, strict=True))
    if hull in kernels:
        return calls[kernels.index(hull)]
    before, after = sum(math.prod(kernel) for kernel in kernels), math.prod(hull)
    size = "x".join(map(str, hull))
    names = ", ".join(str(call.target) for call in calls)
    return Skip(f"{names}: a kernel of {size} would need {after} multiplications instead of {before}")


def _find_kernel_problem(graph_module: GraphModule, terms: list[Node], x: Node, largest: Node) -> str | None:
    """Returns why a term cannot be placed in the largest kernel, or None."""
    conv = _conv(graph_module, largest)
    rank = 2 + len(conv.kernel_size)
    for term in terms:
        layer = None if term is x else modules.called_module(graph_module, term)
        if isinstance(layer, _ConvNd):
            if not _is_in_middle(layer.kernel_size, _find_padding(layer), layer.dilation, conv):
                return f"{term.target} and {largest.target} differ in dilation, or in the center of their kernels"
            continue
        name = x.name if term is x else term.target
        if conv.in_channels != conv.out_channels or set(conv.stride) != {1}:
            return f"{largest.target} has a stride or differing channels, so it cannot include {name}"
        if not _is_in_middle((1,) * (rank - 2), (0,) * (rank - 2), conv.dilation, conv):
            return f"{largest.target} shifts positions, so it cannot include {name}"
        if isinstance(layer, _BatchNorm) and (_RANKS.get(type(layer)) or modules.dims(x)) != rank:
            return f"the input of {name} is not known to have {rank} dimensions"
    return None


def _is_in_middle(
    kernel: tuple[int, ...], padding: tuple[int, ...] | None, dilation: tuple[int, ...], conv: _ConvNd
) -> bool:
    """Returns True if a kernel can be placed in the middle of a larger one."""
    conv_padding = _find_padding(conv)
    if padding is None or conv_padding is None:
        return False
    axes = zip(kernel, padding, dilation, conv.kernel_size, conv_padding, conv.dilation, strict=True)
    return all(
        (conv_size - size) % 2 == 0
        and conv_pad - pad == (conv_size - size) // 2 * conv_gap
        and (size == 1 or gap == conv_gap)  # dilation has no effect on a kernel of size 1
        for size, pad, gap, conv_size, conv_pad, conv_gap in axes
    )


def _find_padding(conv: _ConvNd) -> tuple[int, ...] | None:
    """Returns the number of zeros at both ends of each axis, or None if the ends differ."""
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
    """Returns the kernel of size 1 that scales each channel, for the groups of a convolution."""
    kernel = scale.new_zeros(conv.out_channels, conv.in_channels // conv.groups)
    channels = torch.arange(conv.out_channels, device=scale.device)
    kernel[channels, channels % kernel.shape[1]] = scale
    return kernel.reshape(*kernel.shape, *(1 for _ in conv.kernel_size))
