"""Bounds of the values of a tensor that follow from the graph.

Mainly for attention masks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.transformations.analysis import memory, modules

Bounds = tuple[float, float]

# For two ranges: (the comparison always holds, the comparison may hold).
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
_CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_FULL = ("full", "full_like", "new_full", "scalar_tensor")
# Operators whose result contains only values of the first argument.
_COPIES = ("contiguous", "clone", "alias", "detach", "detach_", "lift_fresh_copy", "to", "_to_copy")
_VIEWS = ("expand", "unsqueeze", "squeeze", "slice", "select", "view", "reshape", "transpose", "permute", "index")
_MAX_DEPTH = 100
_MAX_SIZE = 2**52  # no axis is longer
_MAX_INTEGER = 2**53  # larger integers are not exact in float64


def bounds(graph_module: GraphModule, node: Node, *, first: bool = False) -> Bounds | None:
    """Returns the smallest and largest possible value of a tensor.

    None if unknown, or if it may contain NaN.

    Args:
        graph_module: The graph of the node.
        node: The tensor.
        first: Consider only the first position of the last axis, which a causal mask never hides.
    """
    return _Reader(graph_module).bounds_of(node, first, 0)


class _Reader:
    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._results: dict[tuple[Node, bool], Bounds | None] = {}

    def bounds_of(self, value: Any, first: bool, depth: int) -> Bounds | None:
        if isinstance(value, bool | int | float):
            exact = not math.isnan(value) and (isinstance(value, float) or abs(value) <= _MAX_INTEGER)
            return (float(value), float(value)) if exact else None
        tensor = value.meta.get("val") if isinstance(value, Node) else None
        if not isinstance(tensor, torch.Tensor) or tensor.is_complex() or depth > _MAX_DEPTH:
            return None
        key = value, first and tensor.dim() > 0
        if key not in self._results:
            self._results[key] = _to_dtype(self._read(*key, depth + 1), tensor.dtype)
        return self._results[key]

    def _read(self, node: Node, first: bool, depth: int) -> Bounds | None:
        if node.op == "get_attr":
            return _of_tensor(memory.find_constant(self._graph_module, node), first)
        if not _is_aten_or_python(node) or node.target is torch.ops.aten.view.dtype:
            return None
        if memory.changed_in_place(self._graph_module, node, detached=False):
            return None
        name, args = modules.operator_name(node), node.args
        if name in _CONSTANTS:
            return _CONSTANTS[name], _CONSTANTS[name]
        if name in _FULL:
            return self.bounds_of(args[-1], first, depth)
        if name == "arange":
            return _of_arange(args, first)
        if name in _COPIES:
            return self.bounds_of(args[0], first, depth)
        if name in _VIEWS:
            return self.bounds_of(args[0], first and _keeps_first(node), depth)
        if name in ("tril", "triu") and isinstance(diagonal := args[1] if len(args) > 1 else 0, int):
            return self._of_triangle(name, args[0], diagonal, first, depth)
        if node.kwargs:
            return None
        operands = [self.bounds_of(argument, first, depth) for argument in args]
        if len(args) == 2:
            operands = _promote(args, operands)
        return _of_operation(name, operands, node.meta["val"].dtype)

    def _of_triangle(self, name: str, x: Any, diagonal: int, first: bool, depth: int) -> Bounds | None:
        """Bounds of ``tril`` or ``triu``, which set the other triangle to zero."""
        if first and (diagonal >= 0 if name == "tril" else diagonal >= 1):
            return self.bounds_of(x, first, depth) if name == "tril" else (0.0, 0.0)
        return _union(self.bounds_of(x, first, depth), (0.0, 0.0))


def _is_aten_or_python(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "aten" or getattr(node.target, "__module__", "") == "_operator"


def _of_arange(args: tuple[Any, ...], first: bool) -> Bounds | None:
    start = args[0] if len(args) > 1 else 0
    return (start, start + (0 if first else _MAX_SIZE)) if type(start) is int and len(args) < 3 else None


def _of_operation(name: str, operands: list[Bounds | None], dtype: torch.dtype) -> Bounds | None:
    match name, operands:
        case "where", (condition, yes, no):
            return _choose(condition, yes, no)
        case "masked_fill", (no, condition, yes):
            return _choose(condition, yes, no)
    ranges = [operand for operand in operands if operand is not None]
    if len(ranges) < len(operands):
        return None
    if len(ranges) == 2:
        a, b = ranges
        return _of_binary(name, a, b, dtype)
    match name, ranges:
        case "logical_not" | "bitwise_not", ((low, high),) if dtype is torch.bool:
            low, high = _to_bool((low, high))
            return 1 - high, 1 - low
        case "neg", ((low, high),):
            return -high, -low
    return None


def _of_binary(name: str, a: Bounds, b: Bounds, dtype: torch.dtype) -> Bounds | None:
    if name in _COMPARISONS:
        return _COMPARISONS[name](a, b)
    if name in _JOINS and dtype is torch.bool:
        join, a, b = _JOINS[name], _to_bool(a), _to_bool(b)
        return join(a[0], b[0]), join(a[1], b[1])
    if name == "rsub":
        return b[0] - a[1], b[1] - a[0]
    if name in _ARITHMETIC:
        ends = [_ARITHMETIC[name](x, y) for x in a for y in b]
        return None if any(math.isnan(end) for end in ends) else (min(ends), max(ends))
    return None


def _promote(args: tuple[Any, ...], operands: list[Bounds | None]) -> list[Bounds | None]:
    """Extends the bounds of two operands to their values in the dtype of the computation."""
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    if not all(isinstance(value, torch.Tensor | bool | int | float) for value in values):
        return operands
    dtype = torch.result_type(*values)
    # In half precision, some kernels round a number to the dtype first and some do not.
    return [_union(operand, _to_dtype(operand, dtype)) for operand in operands] if dtype.is_floating_point else operands


def _of_tensor(tensor: torch.Tensor | None, first: bool) -> Bounds | None:
    if tensor is None:
        return None
    tensor = tensor.detach()[..., :1] if first else tensor.detach()
    if not tensor.numel() or bool(tensor.isnan().any()):
        return None
    return tensor.min().item(), tensor.max().item()


def _keeps_first(node: Node) -> bool:
    """Returns True if a view keeps the first position of its input's last axis."""
    name, args, rank = modules.operator_name(node), node.args, node.meta["val"].dim()
    axis: Any = args[1] if len(args) > 1 else 0
    if name == "unsqueeze":
        return axis not in (-1, rank - 1)
    if name == "slice":
        return axis % rank != rank - 1 or len(args) < 3 or args[2] in (None, 0)
    if name == "select":
        return bool(axis % (rank + 1) != rank)
    return name == "expand"


def _to_bool(value: Bounds) -> Bounds:
    return float(value[0] > 0 or value[1] < 0), float(value != (0, 0))


def _choose(condition: Bounds | None, yes: Bounds | None, no: Bounds | None) -> Bounds | None:
    truth = _to_bool(condition) if condition else (0, 1)
    return _union(yes, no) if truth[0] != truth[1] else yes if truth[0] else no


def _union(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _to_dtype(value: Bounds | None, dtype: torch.dtype) -> Bounds | None:
    """Converts bounds to a dtype. Rounding keeps the order of numbers; integers may overflow."""
    if dtype is torch.bool:
        return _to_bool(value) if value else (0.0, 1.0)
    if dtype.is_floating_point:
        if value is None:
            return None
        low, high = torch.tensor(value, dtype=torch.float64).to(dtype).tolist()
        return low, high
    info = torch.iinfo(dtype)
    top = min(info.max, _MAX_INTEGER)
    if value is None or value[0] < max(info.min, -top) or value[1] > top:
        return float(info.min), float(info.max)
    return float(math.floor(value[0])), float(math.ceil(value[1]))
