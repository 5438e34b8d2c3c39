"""The signature of an exported program, in whose shapes the symbols of torch have the names of dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from optexport.errors import TraceError
from optexport.signature.exported_program import input_names, tensor_inputs
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


def read_signature(
    program: ExportedProgram, dynamic: Dynamic | None, example: Iterable[str]
) -> tuple[Signature, tuple[str, ...], dict[Any, str]]:
    """Reads the signature off a program, naming each symbol after the first axis that it appears on.

    Args:
        example: The inputs' names, of which the program may know no more than the arguments of Python.

    Returns:
        The signature, the axes that are fixed though nobody asked for it, and the dimension of each symbol.
    """
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    names: dict[Any, str] = {}
    hints: dict[str, int] = {}
    dims: dict[str, Dim] = {}
    inputs, fixed = [], []
    given = {as_argument(name): name for name in example}
    for placeholder, argument in tensor_inputs(program).items():
        name, value = given.get(argument, argument), placeholders[placeholder].meta["val"]
        if not isinstance(value, torch.Tensor):
            raise TraceError("it is no tensor", location=f"input {name}", hint="Export the program with tensors only.")
        declared = (dynamic or {}).get(name, {})
        conventional = conventional_axes(name, value.dim())
        shape: list[int | str] = []
        for axis, size in enumerate(value.shape):
            hint = int(size.node.hint) if isinstance(size, torch.SymInt) else size
            symbol = _free_symbol(program, size)
            if isinstance(size, torch.SymInt) and " + " in str(declared.get(axis)):
                shape.append(str(declared[axis]))
                if symbol is not None:
                    names.setdefault(symbol, str(declared[axis]))
                continue
            if symbol is None:
                if axis in declared:
                    wanted = declared[axis]
                    raise TraceError(
                        f"the model fixes {wanted.name if isinstance(wanted, Dim) else wanted} to {hint}",
                        location=f"input {name}, axis {axis}",
                        hint="Leave that dimension out of inputs.dynamic, or trace with another size.",
                    )
                shape.append(hint)
                if dynamic is None:
                    fixed.append(f"{name}[{axis}] = {hint}")
                continue
            wanted = declared.get(axis, conventional[axis])
            dim_name = names.setdefault(symbol, wanted.name if isinstance(wanted, Dim) else wanted)
            if hints.setdefault(dim_name, hint) != hint:  # the usual name, but not the usual size
                dim_name = names[symbol] = numbered_axis(name, axis)
            dims[dim_name] = _narrowest(dims.get(dim_name), _range(program, symbol, wanted, dim_name))
            shape.append(dim_name)
        inputs.append(TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(shape)))
    return Signature(tuple(inputs), _outputs(program, names), dims), tuple(fixed), names


def _free_symbol(program: ExportedProgram, size: int | torch.SymInt) -> Any:
    """The symbol of a size that may change; None for one that is fixed, or only moves with others."""
    symbol = size.node.expr if isinstance(size, torch.SymInt) else None
    if symbol is None or not symbol.is_Symbol:
        return None
    limits = program.range_constraints.get(symbol)
    return None if limits is not None and _is_fixed(limits) else symbol


def _range(program: ExportedProgram, symbol: Any, wanted: str | Dim, name: str) -> Dim:
    if isinstance(wanted, Dim):
        return wanted
    limits = program.range_constraints.get(symbol)
    if limits is None:
        return Dim(name, 1, None)
    upper = int(limits.upper) if limits.upper.is_Integer else None
    # A lower end of 2 is what torch.export assumes of every axis, not what it found; a batch may well be of one.
    lower = 1 if name == "batch" and limits.lower <= 2 else max(1, int(limits.lower))
    return Dim(name, lower, None if upper is None or upper >= 2**31 else upper)


def _narrowest(one: Dim | None, other: Dim) -> Dim:
    if one is None:
        return other
    uppers = [dim.max for dim in (one, other) if dim.max is not None]
    return Dim(other.name, max(one.min, other.min), min(uppers, default=None))


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
            raise TraceError("it is complex, which no file format here holds", location=f"output {name}")
        shape = tuple(_size(program, size, names) for size in value.shape)
        specs.append(TensorSpec(name, str(value.dtype).removeprefix("torch."), shape))
    return tuple(specs)


def _size(program: ExportedProgram, size: int | torch.SymInt, names: Mapping[Any, str]) -> int | str:
    """A size of an output, in the names of dimensions: ``s70*2`` becomes ``batch*2``."""
    if not isinstance(size, torch.SymInt):
        return size
    limits = program.range_constraints
    fixed = {s: limits[s].lower for s in size.node.expr.free_symbols if s in limits and _is_fixed(limits[s])}
    expression = size.node.expr.xreplace(fixed)
    if expression.is_Integer:
        return int(expression)
    if expression in names:
        return names[expression]
    return re.sub(r"\bs\d+\b", lambda found: _lookup(found.group(), names), str(expression))


def _is_fixed(limits: Any) -> bool:
    return bool(limits.lower == limits.upper)


def _lookup(symbol: str, names: Mapping[Any, str]) -> str:
    name = next((name for known, name in names.items() if str(known) == symbol), symbol)
    return f"({name})" if " + " in name else name
