"""Between which two numbers the values of a tensor lie, as far as the graph tells: for masks, above all."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import memory, modules

Bounds = tuple[float, float]

# Whether a comparison always holds between two ranges, and whether it ever does.
_COMPARISONS: dict[str, Callable[[Bounds, Bounds], tuple[bool, bool]]] = {
    "lt": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "le": lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    "gt": lambda a, b: (a[0] > b[1], a[1] > b[0]),
    "ge": lambda a, b: (a[0] >= b[1], a[1] >= b[0]),
    "eq": lambda a, b: (a[0] == a[1] == b[0] == b[1], a[0] <= b[1] and b[0] <= a[1]),
    "ne": lambda a, b: (a[1] < b[0] or b[1] < a[0], not a[0] == a[1] == b[0] == b[1]),
}
_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_JOINS = {
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), min),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), max),
}
_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
# What holds values of its first argument, all of them, or some, in another shape, or another dtype.
_COPIES = ("contiguous", "clone", "alias", "detach", "detach_", "lift_fresh_copy", "to", "_to_copy")
_VIEWS = ("expand", "unsqueeze", "squeeze", "slice", "select", "view", "reshape", "transpose", "permute", "index")
_DEPTH = 100


def bounds(graph_module: GraphModule, node: Node, *, first: bool = False) -> Bounds | None:
    """The least and the greatest number that a tensor may hold; None where it may hold any, or NaN.

    Args:
        first: Whether to look only at the first position of the last axis, which a causal mask never hides.
    """
    return _Reader(graph_module).of(node, first, 0)


class _Reader:
    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._known: dict[tuple[Node, bool], Bounds | None] = {}

    def of(self, value: Any, first: bool, depth: int) -> Bounds | None:
        if isinstance(value, bool | int | float):
            exact = not math.isnan(value) and (isinstance(value, float) or abs(value) <= 2**53)
            return (float(value), float(value)) if exact else None
        tensor = value.meta.get("val") if isinstance(value, Node) else None
        if not isinstance(tensor, torch.Tensor) or tensor.is_complex() or depth > _DEPTH:
            return None
        key = value, first and tensor.dim() > 0
        if key not in self._known:
            self._known[key] = _within(self._read(*key, depth + 1), tensor.dtype)
        return self._known[key]

    def _read(self, node: Node, first: bool, depth: int) -> Bounds | None:
        if node.op == "get_attr":
            return _of_constant(memory.constant(self._graph_module, node), first)
        known = getattr(node.target, "namespace", "") == "aten" or getattr(node.target, "__module__", "") == "_operator"
        if not known or node.target is torch.ops.aten.view.dtype:
            return None
        if memory.changed_in_place(self._graph_module, node, detached=False):
            return None
        name, args = modules.operator_name(node), node.args
        if name in _FILLED:
            return _FILLED[name], _FILLED[name]
        if name in ("full", "full_like", "new_full", "scalar_tensor"):
            return self.of(args[-1], first, depth)
        if name == "arange":
            start = args[0] if len(args) > 1 else 0
            longest = 0 if first else 2**52  # no tensor has more
            return (start, start + longest) if type(start) is int and len(args) < 3 else None
        if name in _COPIES:
            return self.of(args[0], first, depth)
        if name in _VIEWS:
            return self.of(args[0], first and _keeps_first(node), depth)
        if name in ("tril", "triu") and isinstance(diagonal := args[1] if len(args) > 1 else 0, int):
            if first and (diagonal >= 0 if name == "tril" else diagonal >= 1):
                return self.of(args[0], first, depth) if name == "tril" else (0.0, 0.0)
            return _either(self.of(args[0], first, depth), (0.0, 0.0))
        if node.kwargs:
            return None
        found = [self.of(argument, first, depth) for argument in args]
        if len(args) == 2:
            found = _promoted(args, found)
        return self._of_operation(name, found, node.meta["val"].dtype)

    def _of_operation(self, name: str, found: list[Bounds | None], dtype: torch.dtype) -> Bounds | None:
        match name, found:
            case "where", (condition, yes, no):
                return _chosen(condition, yes, no)
            case "masked_fill", (no, condition, yes):
                return _chosen(condition, yes, no)
        whole = [each for each in found if each is not None]
        if len(whole) < len(found):
            return None
        match name, whole:
            case "logical_not" | "bitwise_not", ((low, high),) if dtype is torch.bool:
                low, high = _truth((low, high))
                return 1 - high, 1 - low
            case "neg", ((low, high),):
                return -high, -low
            case _, (one, other) if name in _COMPARISONS:
                return _COMPARISONS[name](one, other)
            case _, (one, other) if name in _JOINS and dtype is torch.bool:
                join, one, other = _JOINS[name], _truth(one), _truth(other)
                return join(one[0], other[0]), join(one[1], other[1])
            case "rsub", (one, other):
                return other[0] - one[1], other[1] - one[0]
            case _, (one, other) if name in _ARITHMETIC:
                ends = [_ARITHMETIC[name](a, b) for a in one for b in other]
                return None if any(math.isnan(end) for end in ends) else (min(ends), max(ends))
        return None


def _promoted(args: tuple[Any, ...], found: list[Bounds | None]) -> list[Bounds | None]:
    """Bounds of two operands that also hold them in the dtype that both are computed in, or compared."""
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    if not all(isinstance(value, torch.Tensor | bool | int | float) for value in values):
        return found
    dtype = torch.result_type(*values)
    # Whether a number is rounded first is up to the kernel in half precision.
    return [_either(each, _within(each, dtype)) for each in found] if dtype.is_floating_point else found


def _of_constant(held: torch.Tensor | None, first: bool) -> Bounds | None:
    if held is None:
        return None
    held = held.detach()[..., :1] if first else held.detach()
    if not held.numel() or bool(held.isnan().any()):
        return None
    return held.min().item(), held.max().item()


def _keeps_first(node: Node) -> bool:
    """Whether the first position of the last axis of a view shows that of what is viewed."""
    name, args, rank = modules.operator_name(node), node.args, node.meta["val"].dim()
    given: Any = args[1] if len(args) > 1 else 0
    if name == "unsqueeze":
        return given not in (-1, rank - 1)
    if name == "slice":
        return given % rank != rank - 1 or len(args) < 3 or args[2] in (None, 0)
    if name == "select":
        return bool(given % (rank + 1) != rank)
    return name == "expand"


def _truth(found: Bounds) -> Bounds:
    return float(found[0] > 0 or found[1] < 0), float(found != (0, 0))


def _chosen(condition: Bounds | None, yes: Bounds | None, no: Bounds | None) -> Bounds | None:
    truth = _truth(condition) if condition else (0, 1)
    return _either(yes, no) if truth[0] != truth[1] else yes if truth[0] else no


def _either(one: Bounds | None, other: Bounds | None) -> Bounds | None:
    return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))


def _within(found: Bounds | None, dtype: torch.dtype) -> Bounds | None:
    """The same in a dtype: rounding keeps the order of numbers; an integer may wrap around."""
    if dtype is torch.bool:
        return _truth(found) if found else (0.0, 1.0)
    if dtype.is_floating_point:
        if found is None:
            return None
        low, high = torch.tensor(found, dtype=torch.float64).to(dtype).tolist()
        return low, high
    info = torch.iinfo(dtype)
    top = min(info.max, 2**53)
    if found is None or found[0] < max(info.min, -top) or found[1] > top:
        return float(info.min), float(info.max)
    return float(math.floor(found[0])), float(math.ceil(found[1]))
