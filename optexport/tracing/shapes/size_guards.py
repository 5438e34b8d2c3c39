"""Sizes at which a trace may not hold, because the model chose its way by the size that it was traced with.

``if n % 8 == 0`` is traced in one direction only, and leaves an assertion in the graph that other sizes break. The file
formats drop such assertions, so the sizes that break them are checked on. So are sizes at which ``int(0.7 * n)`` is
another in float32, in which ONNX computes it, than in float64, in which Python does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from optexport.tracing.shapes.size_conditions import LARGEST, candidates, is_broken, sizes_to_try
from optexport.tracing.shapes.size_one import asked_at_one


def within_assertions(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> dict[str, Dim]:
    """Ends each range, on both sides, before the sizes that break an assertion about that dimension alone.

    Images of a few pixels break what holds of all that are larger; with a sequence longer than a chunk the model goes
    another way. A range that would be a single size stays as wide as it is, and its sizes in doubt.

    Args:
        names: The dimension that each of the program's symbols stands for.
        dims: Those whose range nobody declared.
        traced: The size of each dimension in the trace.
    """
    found = dict(dims)
    for expression, in_doubt, free in _doubts(program, names, dims):
        if in_doubt is is_broken and len(free) == 1:
            ((name, symbol),) = free.items()
            if expression == sympy.Ne(symbol, 1):
                continue  # no end of what was traced: torch.export cannot take a 1 for dynamic
            dim = found[name]
            tried = sizes_to_try(dim, expression)
            broken = [size for size in tried if is_broken(expression, {symbol: size})]
            smaller = [size for size in broken if size < traced[name]]
            larger = [size for size in broken if size > traced[name]]
            if larger and larger != [size for size in tried if size >= larger[0]]:
                continue  # true of some sizes beyond it again, as what is true of multiples: no end of a range
            within = [size for size in [*tried, traced[name]] if size not in broken]
            least, most = dim.min, dim.max
            if smaller:
                fine = min(size for size in within if size > smaller[-1])
                least = _last_within(expression, symbol, fine, smaller[-1])
            if larger:
                fine = max(size for size in within if size < larger[0])
                most = _last_within(expression, symbol, fine, larger[0])
            if most is None or least < most:
                found[name] = Dim(name, least, most)
    return found


def _last_within(expression: Any, symbol: sympy.Symbol, within: int, broken: int) -> int:
    """The last size, going from one that does not break an expression to one that does, before it is broken."""
    while abs(within - broken) > 1:
        middle = (within + broken) // 2
        within, broken = (within, middle) if is_broken(expression, {symbol: middle}) else (middle, broken)
    return within


def held_sizes(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> dict[str, str]:
    """Dimensions that an equation in the graph holds to what they were traced at, each with that equation.

    A model that goes another way for images of just the size that it was trained on leaves one, if it was traced at
    that size: ``(height // 16) * (width // 16) == 4`` is true of few other sizes. An equation that is true of a
    multiple of the traced sizes, as ``height % 16 == 0`` or ``height == width``, holds none.

    Args:
        names: The dimension that each of the program's symbols stands for.
        dims: The dimensions to look at.
        traced: The size of each dimension in the trace.
    """
    found: dict[str, str] = {}
    for expression, in_doubt, free in _doubts(program, names, dims):
        if in_doubt is not is_broken or not isinstance(expression, sympy.Equality):
            continue
        groups = [[name] for name in free] + [list(free)]
        larger = [{**traced, **{name: traced[name] * times for name in group}} for group in groups for times in _TIMES]
        allowed = [sizes for sizes in larger if all(sizes[name] <= (dims[name].max or LARGEST) for name in free)]
        if allowed and all(is_broken(expression, {free[name]: sizes[name] for name in free}) for sizes in allowed):
            found |= dict.fromkeys(free, str(expression))
    return found


_TIMES = (2, 3, 4, 5)


@dataclass(frozen=True)
class SuspectSize:
    """What a trace takes for so, and sizes at which it is not.

    Attributes:
        expression: A condition that the graph asserts, or a size that is computed as a fraction.
        sizes: Of every dimension; one set of sizes of each kind that was found.
        is_asserted: Whether the graph asserts it.
        is_exclusion: Whether it is asserted not to be a size: ``(height // 16) * (width // 16) != 4``. A model that
            goes another way at a single size leaves one, if it was traced at any other. The way that it was traced in
            may hold there too, and mostly does.
    """

    expression: Any
    sizes: tuple[dict[str, int], ...]
    is_asserted: bool
    is_exclusion: bool


def find_doubts(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> list[SuspectSize]:
    """Sizes that break an assertion in the graph, or at which another size depends on how a fraction is rounded.

    Args:
        names: The dimension that each of the program's symbols stands for.
        traced: The size of each dimension in the trace.
    """
    doubts: list[SuspectSize] = []
    for expression, in_doubt, free in _doubts(program, names, dims):
        known = ({name: sizes[name] for name in free} for doubt in doubts for sizes in doubt.sizes)
        # Next to the traced sizes models run; at the smallest few do.
        near = () if _is_exclusion(expression) else _neighbours(list(free), dims, traced)
        ways = [itertools.chain(near, known, candidates(expression, list(free), dims, traced))]
        if _is_exclusion(expression) and len(free) > 1:  # where all are alike the model may well go another way
            alike = set.intersection(*(set(sizes_to_try(dims[name], expression)) for name in free))
            ways.append(itertools.chain(dict.fromkeys(free, size) for size in sorted(alike)))
        found = [
            {**traced, **sizes}
            for way in ways
            for sizes in itertools.islice(
                (s for s in way if in_doubt(expression, {free[name]: size for name, size in s.items()})), 1
            )
        ]
        if found:
            doubts.append(SuspectSize(expression, tuple(found), in_doubt is is_broken, _is_exclusion(expression)))
    return doubts


def own_sizes(doubts: Iterable[SuspectSize]) -> list[dict[str, int]]:
    """The sizes in doubt, of those dimensions alone that each doubt is about: whatever the others are, it is one."""
    names = [(doubt, {str(symbol) for symbol in doubt.expression.free_symbols}) for doubt in doubts]
    return [{name: sizes[name] for name in sizes if name in own} for doubt, own in names for sizes in doubt.sizes]


def drop_doubts(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], doubts: Collection[SuspectSize]
) -> None:
    """Takes out, in place, what the graph asserts; the proof is to check the sizes at which it is not so.

    Args:
        names: The dimension that each of the program's symbols stands for.
    """
    _, renamed = renaming(program, names, dims)
    doubted = {doubt.expression for doubt in doubts}
    if doubted:
        _drop(program, lambda expression: expression.xreplace(renamed) in doubted)


def drop_own_exclusions(program: ExportedProgram, graph_module: fx.GraphModule) -> None:
    """Takes out, in place, what the export of a graph asserts sizes not to be, and the graph itself does not.

    A graph goes no other way at any size: what operators compute decides, and not what they look at to choose strides.
    What it asserts itself are sizes that a model does not take, or at which nobody knows what it does.
    """
    own = [value for value, _ in _asserted(graph_module.graph)]
    if not all(isinstance(value, torch.SymBool) for value in own):
        return  # a graph that came without the sizes of its tensors
    shapes = _shapes(graph_module.graph)  # a program takes its parameters first
    renamed = {
        before.node.expr: after.node.expr
        for one, other in zip(reversed(shapes), reversed(_shapes(program.graph)), strict=False)
        for before, after in zip(one, other, strict=True)
        if isinstance(before, torch.SymInt) and isinstance(after, torch.SymInt)
    }
    kept = {value.node.expr.xreplace(renamed) for value in own}
    _drop(
        program,
        lambda expression: (
            _is_exclusion(expression) and expression not in kept and not free_unbacked_symbols(expression)
        ),
    )


def _drop(program: ExportedProgram, is_dropped: Callable[[Any], bool]) -> None:
    for asserted, node in list(_asserted(program.graph)):
        if isinstance(asserted, torch.SymBool) and is_dropped(asserted.node.expr):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def assertions(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that assert a condition on sizes."""
    return list(graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default))


def _asserted(graph: fx.Graph) -> Iterator[tuple[Any, fx.Node]]:
    """The conditions that a graph asserts, as far as they are known, each with the node that does."""
    for node in assertions(graph):
        if isinstance(node.args[0], fx.Node):
            yield node.args[0].meta.get("val"), node


def _shapes(graph: fx.Graph) -> list[Any]:
    return [getattr(node.meta.get("val"), "shape", ()) for node in graph.find_nodes(op="placeholder")]


def _is_exclusion(expression: Any) -> bool:
    return isinstance(expression, sympy.Unequality)


def renaming(
    program: ExportedProgram, names: Mapping[Any, str], dims: Collection[str]
) -> tuple[dict[str, sympy.Symbol], dict[Any, Any]]:
    """A symbol for each dimension, and what takes the place of the program's own: these, and sizes that are fixed."""
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in dims}
    fixed = {symbol: limits.lower for symbol, limits in program.range_constraints.items() if limits.is_singleton()}
    sizes = {symbol: name.split(" + ") for symbol, name in names.items()}  # an axis may be a sum of dimensions
    named = {symbol: sum(symbols[name] for name in size) for symbol, size in sizes.items() if symbols.keys() >= {*size}}
    return symbols, fixed | named


_InDoubt = Callable[[Any, dict[sympy.Symbol, int]], bool]


def _doubts(
    program: ExportedProgram, names: Mapping[Any, str], dims: Collection[str]
) -> Iterator[tuple[Any, _InDoubt, dict[str, sympy.Symbol]]]:
    """What is asserted of sizes, and sizes that are computed as fractions; when each is in doubt; and of what sizes."""
    symbols, renamed = renaming(program, names, dims)
    for doubt, in_doubt in said_of_sizes(program):
        expression = doubt.xreplace(renamed)
        free = {name: symbol for name, symbol in symbols.items() if symbol in expression.free_symbols}
        if free and len(free) == len(expression.free_symbols):
            yield expression, in_doubt, free  # any other is always so, or about a value that only running it tells


def said_of_sizes(program: ExportedProgram) -> Iterator[tuple[Any, _InDoubt]]:
    """What a program asserts of sizes, and sizes that are computed as fractions, in the symbols of torch."""
    fractions: dict[Any, None] = {}
    for asserted, _ in _asserted(program.graph):
        if isinstance(asserted, torch.SymBool):
            yield asserted.node.expr, is_broken
    yield from ((expression, is_broken) for expression in [*_left_out(program), *asked_at_one(program)])
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.atoms(*_FLOATS):
                fractions[size.node.expr] = None
    yield from ((expression, _rounded_otherwise) for expression in fractions)


def _left_out(program: ExportedProgram) -> list[Any]:
    """What ``torch.export`` asserts where it has an operator to assert it before, of a graph that has none."""
    sizes = [size for shape in _shapes(program.graph) for size in shape if isinstance(size, torch.SymInt)]
    if not sizes or any(node.op == "call_function" for node in program.graph.nodes):
        return []
    asserted = sizes[0].node.shape_env.deferred_runtime_asserts.values()
    return [each.expr for every in asserted for each in every]


_FLOATS = (sympy.Float, ToFloat, FloatTrueDiv, IntTrueDiv)


def _rounded_otherwise(expression: Any, sizes: dict[sympy.Symbol, int]) -> bool:
    try:
        double = sympy_interp(PythonReferenceAnalysis, sizes, expression)
        return bool(sympy_interp(_InFloat32, sizes, expression) != double)
    except (NotImplementedError, AssertionError, ArithmeticError, TypeError):
        return False  # an operation of which torch has no Python version


class _InFloat32(PythonReferenceAnalysis):  # type: ignore[no-untyped-call, unused-ignore]
    """Computes a size as an ONNX file does."""

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
        size = traced[name] + step
        if dims[name].min <= size <= (dims[name].max or size):
            yield {**{other: traced[other] for other in free}, name: size}
