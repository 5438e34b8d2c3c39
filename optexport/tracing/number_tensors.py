"""Writes computations with numbers that a model reads from tensors as computations with tensors.

``v = x.max().item()`` is a Python float, and ``v > 0.3`` compares it in float64. ``torch.onnx`` keeps such numbers in
float32, and decides comparisons of them while it converts. Python also raises for a division by zero, which a graph
computes for the way of a branch that is not taken. Here the numbers become tensors of float64, int64 and bool.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram

from optexport.tracing.value_checks import eliminate_dead_code

aten = torch.ops.aten

_READS = (aten.item.default, aten._local_scalar_dense.default)
_FACTORIES = (aten.full.default, aten.full_like.default, aten.new_full.default)
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")
_NUMBER_TYPES = ("number", "Optional[number]")
_DTYPES: Mapping[type, torch.dtype] = {
    **dict.fromkeys((bool, torch.SymBool), torch.bool),
    **dict.fromkeys((int, torch.SymInt), torch.int64),
    **dict.fromkeys((float, torch.SymFloat), torch.float64),
}
_ZEROS: Mapping[torch.dtype | None, bool | int | float] = {torch.bool: False, torch.int64: 0, torch.float64: 0.0}

# Functions of numbers, each with an operator for tensors and the dtype of its operands, which is None for the largest.
_FUNCTIONS: Mapping[Any, tuple[Any, torch.dtype | None]] = {
    operator.add: (aten.add.Tensor, None),
    operator.sub: (aten.sub.Tensor, None),
    operator.mul: (aten.mul.Tensor, None),
    operator.mod: (aten.remainder.Tensor, None),
    operator.floordiv: (aten.floor_divide.default, None),
    operator.neg: (aten.neg.default, None),
    operator.abs: (aten.abs.default, None),
    **{getattr(operator, name): (getattr(aten, name).Tensor, None) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    operator.and_: (aten.logical_and.default, torch.bool),
    operator.or_: (aten.logical_or.default, torch.bool),
    torch.sym_not: (aten.logical_not.default, torch.bool),
    operator.truediv: (aten.div.Tensor, torch.float64),
    operator.pow: (aten.pow.Tensor_Tensor, torch.float64),
    math.floor: (aten.floor.default, torch.float64),
    math.ceil: (aten.ceil.default, torch.float64),
    math.trunc: (aten.trunc.default, torch.float64),
    round: (aten.round.default, torch.float64),
    torch.sym_int: (aten.trunc.default, torch.float64),
    **{
        getattr(torch, f"_sym_{name}"): (getattr(aten, name).default, torch.float64)
        for name in ("sqrt", "sin", "cos", "tanh", "log2")
    },
}
# Python's max(a, b) is b if b > a, and a otherwise, also if one of them is NaN.
_EXTREMES: Mapping[Any, Any] = {torch.sym_max: aten.gt.Tensor, torch.sym_min: aten.lt.Tensor}


def write_numbers_as_tensors(program: ExportedProgram) -> None:
    """Replaces numbers that are read from tensors, in place, wherever an operator accepts a tensor instead.

    Numbers that are sizes stay numbers.
    """
    modules = [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    is_changed = [_Writer(module.graph).write() for module in modules]
    if any(is_changed):
        eliminate_dead_code(program)
        for module in modules:
            module.recompile()


class _Writer:
    """Replaces the numbers of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._read: set[object] = set()  # numbers that depend on the values of tensors
        self._tensors: dict[object, fx.Node] = {}
        self._origin: dict[str, Any] = {}
        values = (node.meta.get("val") for node in graph.nodes)
        self._fake_mode: Any = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])

    def write(self) -> bool:
        """Returns True if the graph has changed."""
        is_changed = False
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            self._origin = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
            with self._graph.inserting_before(node):
                if _dtype(node) is None:
                    is_changed |= self._write_arguments(node)
                elif node.target in _READS:
                    self._read.add(node)
                    self._tensors[node] = self._read_tensor(node)
                    is_changed = True
                elif not self._read.isdisjoint(node.all_input_nodes):
                    self._read.add(node)
                    if (tensor := self._compute(node)) is not None:
                        self._tensors[node] = tensor
                        is_changed |= self._read_rounded(node, tensor)
        return is_changed

    def _read_rounded(self, node: fx.Node, tensor: fx.Node) -> bool:
        """Reads a whole number that comes from a float again from its tensor, because it may be a size.

        ONNX would compute the float in float32: ``int(20 * k.item())`` is 17 for the float32 next to 0.9, and not 18.
        """
        operands = [_dtype(operand) for operand in node.args]
        if _dtype(node) is not torch.int64 or torch.float64 not in operands:
            return False
        number: fx.Node = self._graph.call_function(aten.item.default, (tensor,))
        number.meta = {**self._origin, "val": node.meta["val"]}
        node.replace_all_uses_with(number)
        self._tensors[number] = tensor
        self._read.add(number)
        return True

    def _read_tensor(self, node: fx.Node) -> fx.Node:
        """Copies a number where it is read, because its tensor may change later."""
        source: Any = node.args[0]
        scalar = self._call(aten.reshape.default, (source, []), source.meta["val"].dtype)
        return self._call(aten.to.dtype, (scalar, _dtype(node), False, True), _dtype(node))

    def _compute(self, node: fx.Node) -> fx.Node | None:
        """Returns a number as a tensor, computed from its operands; None if there is no operator for that."""
        operands = [argument for argument in node.args if argument is not None]  # the digits of round
        dtypes = [_dtype(operand) for operand in operands]
        if None in dtypes or node.kwargs:
            return None
        largest = max(dtypes, key=list(_ZEROS).index)
        if node.target is torch.sym_float:
            result = self._as_tensor(operands[0], torch.float64)
        elif node.target is torch.sym_ite:
            condition, *values = operands
            largest = max(dtypes[1:], key=list(_ZEROS).index)
            tensors = [self._as_tensor(condition, torch.bool), *(self._as_tensor(v, largest) for v in values)]
            result = self._call(aten.where.self, tensors, largest)
        elif node.target in _EXTREMES:
            first, second = (self._as_tensor(operand, largest) for operand in operands)
            is_second = self._call(_EXTREMES[node.target], (second, first), torch.bool)
            result = self._call(aten.where.self, (is_second, second, first), largest)
        elif node.target in _FUNCTIONS and (node.target is not round or len(operands) == 1):
            function, dtype = _FUNCTIONS[node.target]
            if dtype is torch.bool and largest is not torch.bool:  # bits of whole numbers
                return None
            dtype = dtype or (torch.int64 if largest is torch.bool else largest)
            tensors = [self._as_tensor(operand, dtype) for operand in operands]
            result = self._call(function, tensors, torch.bool if _dtype(node) is torch.bool else dtype)
        else:
            return None
        return self._cast(result, _dtype(node))

    def _as_tensor(self, number: Any, dtype: torch.dtype | None) -> fx.Node:
        """Returns a number as a tensor of a dtype."""
        if number in self._tensors:
            return self._cast(self._tensors[number], dtype)
        if isinstance(_value(number), torch.SymBool) and (tensor := self._compute(number)) is not None:
            return self._cast(tensor, dtype)  # a comparison of sizes
        return self._call(aten.scalar_tensor.default, (number,), dtype, {"dtype": dtype})

    def _cast(self, tensor: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        return tensor if tensor.meta["val"].dtype is dtype else self._call(aten.to.dtype, (tensor, dtype), dtype)

    def _call(
        self, target: Any, args: Sequence[Any], dtype: torch.dtype | None, kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        """Adds a call whose result has no dimensions."""
        node: fx.Node = self._graph.call_function(target, tuple(args), dict(kwargs or {}))
        with self._fake_mode:
            node.meta = {**self._origin, "val": torch.empty((), dtype=dtype)}
        return node

    def _write_arguments(self, node: fx.Node) -> bool:
        """Replaces the numbers among the arguments of a call; returns False if there are none that can be replaced."""
        value, target = _value(node), node.target
        if not isinstance(value, torch.Tensor) or not isinstance(target, torch._ops.OpOverload):
            return False
        if target is aten.scalar_tensor.default:
            number = node.args[0]
            if number not in self._read and not isinstance(_value(number), torch.SymBool):
                return False
            node.args, node.kwargs = (self._as_tensor(number, _dtype(number)), value.dtype, False, True), {}
            node.target = aten.to.dtype
            return True
        indexes = [index for index, argument in enumerate(node.args) if argument in self._read]
        if not indexes:
            return False
        if target in _FACTORIES:
            *sizes, number = node.args
            empty = self._call(target, (*sizes, _ZEROS[_dtype(number)]), None, {**node.kwargs, "dtype": value.dtype})
            empty.meta["val"] = value
            node.target, node.args, node.kwargs = aten.fill.Tensor, (empty, self._as_tensor(number, value.dtype)), {}
            return True
        overload = _find_tensor_overload(target, indexes)
        if overload is None:
            return False
        for index, argument in enumerate(node.args):
            if _dtype(argument) is not None and str(overload._schema.arguments[index].type) in _TENSOR_TYPES:
                node.update_arg(index, self._as_tensor(argument, _operand_dtype(node, argument)))
        node.target = overload
        return True


def _value(argument: object) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _dtype(argument: object) -> torch.dtype | None:
    """Returns the dtype of a number as a tensor; None for anything else."""
    return _DTYPES.get(type(_value(argument)))


def _operand_dtype(node: fx.Node, number: object) -> torch.dtype:
    """Returns the dtype in which a call uses a number among its arguments."""
    dtype: torch.dtype = _value(node).dtype
    tensors = [value for argument in node.args if isinstance(value := _value(argument), torch.Tensor)]
    if dtype is not torch.bool or not tensors:
        return dtype
    return torch.result_type(torch.empty(0, dtype=tensors[0].dtype), _ZEROS[_dtype(number)])  # a comparison


def _find_tensor_overload(target: torch._ops.OpOverload, indexes: Collection[int]) -> torch._ops.OpOverload | None:
    """Returns the overload that takes tensors in place of the numbers at some positions."""
    types = [str(argument.type) for argument in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        overload: torch._ops.OpOverload = getattr(target.overloadpacket, name)
        candidates = [str(argument.type) for argument in overload._schema.arguments]
        if len(candidates) == len(types) and all(
            new in _TENSOR_TYPES and (old == new or old in _NUMBER_TYPES)
            if index in indexes
            else old == new or (old in _NUMBER_TYPES and new in _TENSOR_TYPES)
            for index, (old, new) in enumerate(zip(types, candidates, strict=True))
        ):
            return overload
    return None
