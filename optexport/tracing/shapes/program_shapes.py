"""Reads the signature of an exported program, and names its symbolic sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from optexport.errors import FixedSizeError, TraceError
from optexport.signature.program_arguments import input_names, tensor_inputs
from optexport.signature.signature import (
    Dim,
    Dynamic,
    Signature,
    TensorSpec,
    as_argument,
    conventional_axes,
    named_outputs,
    numbered_axis,
)
from optexport.tracing.shapes.fixed_sizes import choose_hint, describe_fixing_line, find_fixing_line


def read_signature(
    program: ExportedProgram, dynamic: Dynamic | None, example: Iterable[str]
) -> tuple[Signature, tuple[str, ...], dict[Any, str]]:
    """Reads the signature of a program; a symbol has the name of the first axis with it.

    Args:
        example: The names of the inputs; the program may only have their names as Python arguments.

    Returns:
        The signature, the axes that are fixed although no fixed size was declared, and the dimension of each symbol.

    Raises:
        TraceError: The program fixes a declared axis, or an input or output is not supported.
    """
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    names = {as_argument(name): name for name in example}
    reader = _SignatureReader(program, dynamic)
    inputs = tuple(
        reader.read_input(names.get(argument, argument), placeholders[placeholder].meta["val"])
        for placeholder, argument in tensor_inputs(program).items()
    )
    signature = Signature(inputs, _outputs(program, reader.symbols), reader.dims)
    return signature, tuple(reader.fixed), reader.symbols


class _SignatureReader:
    """Names the sizes of a program's inputs.

    Attributes:
        symbols: The dimension of each symbol.
        dims: The dimensions by name, with their ranges.
        fixed: Axes that are fixed although no fixed size was declared.
    """

    def __init__(self, program: ExportedProgram, dynamic: Dynamic | None) -> None:
        self.symbols: dict[Any, str] = {}
        self.dims: dict[str, Dim] = {}
        self.fixed: list[str] = []
        self._program = program
        self._dynamic = dynamic
        self._hints: dict[str, int] = {}

    def read_input(self, name: str, value: Any) -> TensorSpec:
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                "the program takes this input as a Python value, not as a tensor",
                location=f"input {name}",
                hint="Export the program with tensors as its only inputs.",
            )
        declared = (self._dynamic or {}).get(name, {})
        conventional = conventional_axes(name, value.dim())
        shape = tuple(
            self._read_size(name, axis, size, declared, conventional[axis]) for axis, size in enumerate(value.shape)
        )
        return TensorSpec(name, str(value.dtype).removeprefix("torch."), shape)

    def _read_size(
        self, name: str, axis: int, size: int | torch.SymInt, declared: Mapping[int, str | Dim], conventional: str
    ) -> int | str:
        hint = int(size.node.hint) if isinstance(size, torch.SymInt) else size
        symbol = _free_symbol(self._program, size)
        if isinstance(size, torch.SymInt) and " + " in str(declared.get(axis)):  # a sum of dimensions
            if symbol is not None:
                self.symbols.setdefault(symbol, str(declared[axis]))
            return str(declared[axis])
        if symbol is None:
            return self._fix(name, axis, hint, declared)
        dim = declared.get(axis, conventional)
        dim_name = self.symbols.setdefault(symbol, dim.name if isinstance(dim, Dim) else dim)
        if self._hints.setdefault(dim_name, hint) != hint:  # another input has this name with another size
            dim_name = self.symbols[symbol] = numbered_axis(name, axis)
        self.dims[dim_name] = _narrowest(self.dims.get(dim_name), _range(self._program, symbol, dim, dim_name))
        return dim_name

    def _fix(self, name: str, axis: int, hint: int, declared: Mapping[int, str | Dim]) -> int:
        if axis in declared:
            dim, line = declared[axis], find_fixing_line(self._program, hint)
            raise FixedSizeError(
                f"the model fixes {dim.name if isinstance(dim, Dim) else dim} to {hint}{describe_fixing_line(line)}",
                location=f"input {name}, axis {axis}",
                hint=choose_hint(line, "Remove the dimension from inputs.dynamic, or trace with another size."),
            )
        if self._dynamic is None:
            self.fixed.append(f"{name}[{axis}] = {hint}")
        return hint


def _free_symbol(program: ExportedProgram, size: int | torch.SymInt) -> Any:
    """Returns the symbol of a dynamic size; None for fixed and for computed sizes."""
    symbol = size.node.expr if isinstance(size, torch.SymInt) else None
    if symbol is None or not symbol.is_Symbol:
        return None
    limits = program.range_constraints.get(symbol)
    return None if limits is not None and _is_fixed(limits) else symbol


def _range(program: ExportedProgram, symbol: Any, declared: str | Dim, name: str) -> Dim:
    if isinstance(declared, Dim):
        return declared
    limits = program.range_constraints.get(symbol)
    if limits is None:
        return Dim(name, 1, None)
    upper = int(limits.upper) if limits.upper.is_Integer else None
    # torch.export assumes a minimum of 2 for every axis; a batch of one is fine.
    lower = 1 if name == "batch" and limits.lower <= 2 else max(1, int(limits.lower))
    return Dim(name, lower, None if upper is None or upper >= 2**31 else upper)


def _narrowest(first: Dim | None, second: Dim) -> Dim:
    if first is None:
        return second
    maxima = [dim.max for dim in (first, second) if dim.max is not None]
    multiple = math.lcm(first.multiple_of, second.multiple_of)
    return Dim(second.name, max(first.min, second.min), min(maxima, default=None), multiple)


def _outputs(program: ExportedProgram, names: Mapping[Any, str]) -> tuple[TensorSpec, ...]:
    (output,) = program.graph.find_nodes(op="output")
    count = len(program.graph_signature.user_outputs)
    leaves = [node.meta["val"] if isinstance(node, fx.Node) else node for node in output.args[0][-count:]]
    returned = pytree.tree_unflatten(leaves, program.call_spec.out_spec)
    tensors = named_outputs(returned, input_names(program), torch.Tensor)
    if not tensors:
        raise TraceError("the model returns no tensor", location="output")
    specs = []
    for name, value in tensors.items():
        if value.is_complex():
            raise TraceError(
                "complex numbers are not supported by the file formats",
                location=f"output {name}",
                hint="Return torch.view_as_real(x) instead.",
            )
        shape = tuple(_size(program, size, names) for size in value.shape)
        specs.append(TensorSpec(name, str(value.dtype).removeprefix("torch."), shape))
    return tuple(specs)


def _size(program: ExportedProgram, size: int | torch.SymInt, names: Mapping[Any, str]) -> int | str:
    """Returns an output's size with dimension names: ``s70*2`` becomes ``batch*2``."""
    if not isinstance(size, torch.SymInt):
        return size
    limits = program.range_constraints
    fixed = {s: limits[s].lower for s in size.node.expr.free_symbols if s in limits and _is_fixed(limits[s])}
    expression = size.node.expr.xreplace(fixed)
    if expression.is_Integer:
        return int(expression)
    if expression in names:
        return names[expression]
    return re.sub(r"\bs\d+\b", lambda match: _lookup(match.group(), names), str(expression))


def _is_fixed(limits: Any) -> bool:
    return bool(limits.lower == limits.upper)


def _lookup(symbol: str, names: Mapping[Any, str]) -> str:
    name = next((name for key, name in names.items() if str(key) == symbol), symbol)
    return f"({name})" if " + " in name else name
