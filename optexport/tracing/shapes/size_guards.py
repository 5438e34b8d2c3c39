"""Finds sizes at which a trace may be wrong because the model branches on sizes.

``if n % 8 == 0`` is traced in one direction only, and leaves an assertion in the graph, which other sizes break. File
formats drop assertions, so these sizes are part of the parity check. So are sizes at which ``int(0.7 * n)`` differs
between float32, used by ONNX, and float64, used by Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from optexport.signature.signature import Dim
from optexport.tracing.shapes.operator_conditions import find_operator_conditions
from optexport.tracing.shapes.size_conditions import LARGEST, candidates, is_broken, sizes_to_try
from optexport.tracing.shapes.size_one import find_size_one_conditions


def narrow_ranges(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> dict[str, Dim]:
    """Narrows ranges to exclude sizes that break an assertion about a single dimension.

    For example, very small images are excluded, or sequences longer than a chunk, with which the model takes another
    branch. A range that would shrink to a single size does not change; its other sizes are suspect.

    Args:
        names: The dimension of each symbol of the program.
        dims: The dimensions whose ranges were not declared.
        traced: The traced size of each dimension.
    """
    narrowed = dict(dims)
    for expression, free in _with_dimensions(iter_assertions(program), program, names, dims):
        if len(free) == 1:
            ((name, symbol),) = free.items()
            if expression == sympy.Ne(symbol, 1):
                continue  # torch.export never traces a dynamic size of 1, so this does not limit the range
            narrowed[name] = _narrow(narrowed[name], expression, symbol, traced[name])
    return narrowed


def _narrow(dim: Dim, expression: Any, symbol: sympy.Symbol, traced: int) -> Dim:
    """Narrows one range to exclude sizes that break a condition, if a connected range is left."""
    sizes = sizes_to_try(dim, expression)
    broken = [size for size in sizes if is_broken(expression, {symbol: size})]
    smaller = [size for size in broken if size < traced]
    larger = [size for size in broken if size > traced]
    if larger and larger != [size for size in sizes if size >= larger[0]]:
        return dim  # some larger sizes are valid again, as with n % 8 == 0
    valid = [size for size in [*sizes, traced] if size not in broken]
    minimum, maximum = dim.min, dim.max
    if smaller:
        smallest = min(size for size in valid if size > smaller[-1])
        minimum = _bisect(expression, symbol, smallest, smaller[-1], dim.multiple_of)
    if larger:
        largest = max(size for size in valid if size < larger[0])
        maximum = _bisect(expression, symbol, largest, larger[0], dim.multiple_of)
    return replace(dim, min=minimum, max=maximum) if maximum is None or minimum < maximum else dim


def _bisect(expression: Any, symbol: sympy.Symbol, valid: int, broken: int, step: int = 1) -> int:
    """Returns the valid size next to the first one that breaks a condition; both are multiples of the step."""
    while abs(valid - broken) > step:
        middle = (valid + broken) // 2 // step * step
        valid, broken = (valid, middle) if is_broken(expression, {symbol: middle}) else (middle, broken)
    return valid


def find_fixed_dims(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> dict[str, str]:
    """Returns dimensions that an equation in the graph fixes to the traced size.

    A model with a special branch for images of its training size leaves such an equation if it was traced at that size:
    ``(height // 16) * (width // 16) == 4`` is true for few other sizes. Equations that are also true for multiples of
    the traced sizes, such as ``height % 16 == 0`` or ``height == width``, fix nothing.

    Args:
        names: The dimension of each symbol of the program.
        dims: The dimensions to check.
        traced: The traced size of each dimension.
    """
    equations: dict[str, str] = {}
    for expression, free in _with_dimensions(iter_assertions(program), program, names, dims):
        if not isinstance(expression, sympy.Equality):
            continue
        groups = [[name] for name in free] + [list(free)]
        larger = [
            {**traced, **{name: traced[name] * times for name in group}} for group in groups for times in _MULTIPLES
        ]
        allowed = [sizes for sizes in larger if all(sizes[name] <= (dims[name].max or LARGEST) for name in free)]
        if allowed and all(is_broken(expression, {free[name]: sizes[name] for name in free}) for sizes in allowed):
            equations |= dict.fromkeys(free, str(expression))
    return equations


_MULTIPLES = (2, 3, 4, 5)


@dataclass(frozen=True)
class SuspectSize:
    """An assumption of the trace, with sizes at which it is false.

    Attributes:
        expression: A condition that the graph asserts, or a size that is computed with floating-point numbers.
        sizes: Suspect sizes. Each entry has all dimensions.
        is_asserted: True for a condition, False for a computed size.
        is_exclusion: True if the condition excludes sizes: ``(height // 16) * (width // 16) != 4``. A model with a
            special branch for one size leaves such a condition if it was traced at another size. Most often both
            branches compute the same there.
        is_of_operator: True if only operators asked for the condition, not the model.
    """

    expression: Any
    sizes: tuple[dict[str, int], ...]
    is_asserted: bool
    is_exclusion: bool
    is_of_operator: bool = False

    @property
    def names(self) -> set[str]:
        """The dimensions in the expression."""
        return {str(symbol) for symbol in self.expression.free_symbols}


def find_suspect_sizes(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> list[SuspectSize]:
    """Returns the assumptions that some sizes break.

    Args:
        names: The dimension of each symbol of the program.
        traced: The traced size of each dimension.
    """
    suspects: list[SuspectSize] = []
    _, renamed = renaming(program, names, dims)
    of_operators = {expression.xreplace(renamed) for expression in find_operator_conditions(program)}
    asserted = _with_dimensions(iter_assertions(program), program, names, dims)
    computed = _with_dimensions(_iter_float_sizes(program), program, names, dims)
    assumptions = [(*assertion, True) for assertion in asserted] + [(*size, False) for size in computed]
    for expression, free, is_asserted in assumptions:
        is_false = is_broken if is_asserted else _is_rounded_differently
        earlier = ({name: sizes[name] for name in free} for suspect in suspects for sizes in suspect.sizes)
        # Models run at sizes near the traced ones more often than at the smallest sizes.
        near = () if is_exclusion(expression) else _neighbours(list(free), dims, traced)
        searches = [itertools.chain(near, earlier, candidates(expression, list(free), dims, traced))]
        if is_exclusion(expression) and len(free) > 1:  # models often have a special branch for square images
            equal = set.intersection(*(set(sizes_to_try(dims[name], expression)) for name in free))
            searches.append(itertools.chain(dict.fromkeys(free, size) for size in sorted(equal)))
        suspect_sizes = [
            {**traced, **sizes}
            for search in searches
            for sizes in itertools.islice(
                (s for s in search if is_false(expression, {free[name]: size for name, size in s.items()})), 1
            )
        ]
        if suspect_sizes:
            exclusion, of_operator = is_exclusion(expression), expression in of_operators
            suspects.append(SuspectSize(expression, tuple(suspect_sizes), is_asserted, exclusion, of_operator))
    return suspects


def list_suspect_sizes(suspects: Iterable[SuspectSize]) -> list[dict[str, int]]:
    """Returns the suspect sizes, each with only the dimensions in its expression."""
    names = [(suspect, suspect.names) for suspect in suspects]
    return [{name: sizes[name] for name in sizes if name in own} for suspect, own in names for sizes in suspect.sizes]


def drop_assertions(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], suspects: Collection[SuspectSize]
) -> None:
    """Removes assertions, in place; the parity check must cover the sizes that break them.

    Args:
        names: The dimension of each symbol of the program.
    """
    _, renamed = renaming(program, names, dims)
    conditions = {suspect.expression for suspect in suspects}
    if conditions:
        _drop(program, lambda expression: expression.xreplace(renamed) in conditions)


def drop_own_exclusions(program: ExportedProgram, graph_module: fx.GraphModule) -> None:
    """Removes, in place, excluded sizes that a graph's second export added.

    A graph has no branches, so the added exclusions come from operators that only choose strides. The graph's own
    exclusions stay: these are sizes that the model refuses or at which its behavior is unknown.
    """
    own = [value for value, _ in _asserted(graph_module.graph)]
    if not all(isinstance(value, torch.SymBool) for value in own):
        return  # the graph does not have the shapes of its tensors
    shapes = _shapes(graph_module.graph)  # the program's placeholders begin with its parameters
    renamed = {
        before.node.expr: after.node.expr
        for old_shape, new_shape in zip(reversed(shapes), reversed(_shapes(program.graph)), strict=False)
        for before, after in zip(old_shape, new_shape, strict=True)
        if isinstance(before, torch.SymInt) and isinstance(after, torch.SymInt)
    }
    own_conditions = {value.node.expr.xreplace(renamed) for value in own}
    _drop(
        program,
        lambda expression: (
            is_exclusion(expression) and expression not in own_conditions and not free_unbacked_symbols(expression)
        ),
    )


def _drop(program: ExportedProgram, is_dropped: Callable[[Any], bool]) -> None:
    for asserted, node in list(_asserted(program.graph)):
        if isinstance(asserted, torch.SymBool) and is_dropped(asserted.node.expr):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def assertions(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes of a graph that assert a condition on sizes."""
    return list(graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default))


def _asserted(graph: fx.Graph) -> Iterator[tuple[Any, fx.Node]]:
    """Yields the asserted conditions of a graph, each with its node."""
    for node in assertions(graph):
        if isinstance(node.args[0], fx.Node):
            yield node.args[0].meta.get("val"), node


def _shapes(graph: fx.Graph) -> list[Any]:
    return [getattr(node.meta.get("val"), "shape", ()) for node in graph.find_nodes(op="placeholder")]


def is_exclusion(expression: Any) -> bool:
    """Returns True for a condition that excludes sizes; see `SuspectSize`."""
    return isinstance(expression, sympy.Unequality)


def renaming(
    program: ExportedProgram, names: Mapping[Any, str], dims: Collection[str]
) -> tuple[dict[str, sympy.Symbol], dict[Any, Any]]:
    """Returns a symbol for each dimension, and replacements for the program's symbols.

    A symbol is replaced by its dimension, by a sum of dimensions, or by a number if its size is fixed.
    """
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in dims}
    fixed = {symbol: limits.lower for symbol, limits in program.range_constraints.items() if limits.is_singleton()}
    sizes = {symbol: name.split(" + ") for symbol, name in names.items()}
    named = {symbol: sum(symbols[name] for name in size) for symbol, size in sizes.items() if symbols.keys() >= {*size}}
    return symbols, fixed | named


_IsFalse = Callable[[Any, dict[sympy.Symbol, int]], bool]


def _with_dimensions(
    expressions: Iterable[Any], program: ExportedProgram, names: Mapping[Any, str], dims: Collection[str]
) -> Iterator[tuple[Any, dict[str, sympy.Symbol]]]:
    """Yields each expression of dimensions with the symbols of its dimensions."""
    symbols, renamed = renaming(program, names, dims)
    for original in expressions:
        expression = original.xreplace(renamed)
        free = {name: symbol for name, symbol in symbols.items() if symbol in expression.free_symbols}
        # Assumptions without dimensions are always true; others depend on values that are unknown before the run.
        if free and len(free) == len(expression.free_symbols):
            yield expression, free


def iter_assertions(program: ExportedProgram) -> Iterator[Any]:
    """Yields the conditions on sizes that a program asserts."""
    for asserted, _ in _asserted(program.graph):
        if isinstance(asserted, torch.SymBool):
            yield asserted.node.expr
    yield from (*_missing_assertions(program), *find_size_one_conditions(program))


def _iter_float_sizes(program: ExportedProgram) -> Iterator[Any]:
    """Yields the sizes that a program computes with floating-point numbers."""
    fractions: dict[Any, None] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.atoms(*_FLOATS):
                fractions[size.node.expr] = None
    yield from fractions


def _missing_assertions(program: ExportedProgram) -> list[Any]:
    """Returns the assertions that ``torch.export`` omits, which happens in graphs without operators."""
    sizes = [size for shape in _shapes(program.graph) for size in shape if isinstance(size, torch.SymInt)]
    if not sizes or any(node.op == "call_function" for node in program.graph.nodes):
        return []
    groups = sizes[0].node.shape_env.deferred_runtime_asserts.values()
    return [assertion.expr for group in groups for assertion in group]


_FLOATS = (sympy.Float, ToFloat, FloatTrueDiv, IntTrueDiv)


def _is_rounded_differently(expression: Any, sizes: dict[sympy.Symbol, int]) -> bool:
    try:
        double = sympy_interp(PythonReferenceAnalysis, sizes, expression)
        return bool(sympy_interp(_InFloat32, sizes, expression) != double)
    except (NotImplementedError, AssertionError, ArithmeticError, TypeError):
        return False  # torch has no Python version of an operation


class _InFloat32(PythonReferenceAnalysis):  # type: ignore[no-untyped-call, unused-ignore]
    """Computes a size in float32, as an ONNX file does."""

    @staticmethod
    def constant(c: Any, dtype: torch.dtype) -> Any:
        return np.float32(c) if dtype.is_floating_point else int(c)

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return np.float32(x)

    @staticmethod
    def truediv(a: Any, b: Any) -> Any:
        return np.float32(a) / np.float32(b)

    int_truediv = truediv


def _neighbours(free: list[str], dims: Mapping[str, Dim], traced: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for name, step in itertools.product(free, (1, -1)):
        size = traced[name] + step * dims[name].multiple_of
        if size in dims[name]:
            yield {**{dim_name: traced[dim_name] for dim_name in free}, name: size}
