"""Sizes at which a trace may not hold, because the model chose its way by the size that it was traced with.

``if n % 8 == 0`` is traced in one direction only, and leaves an assertion in the graph that other sizes break. The file
formats drop such assertions, so the sizes that break them are checked on. So are sizes at which ``int(0.7 * n)`` is
another in float32, in which ONNX computes it, than in float64, in which Python does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
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
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from optexport.signature import Dim

# Of every dimension, all sizes up to so many are tried, of one whose range is declared more; beyond it powers of two,
# the numbers that the assertion names, their products, and what is next to them.
_ALL_UP_TO = 512
_ALL_DECLARED_UP_TO = 4096
_ALL_PAIRS_UP_TO = 64
_MOST_COMBINATIONS = 8192
_MOST_NUMBERS = 6
_LARGEST = 2**20


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
        if in_doubt is _broken and len(free) == 1:
            ((name, symbol),) = free.items()
            dim = found[name]
            tried = _sizes(dim, expression)
            broken = [size for size in tried if _broken(expression, {symbol: size})]
            larger = [size for size in broken if size > traced[name]]
            if larger and larger != [size for size in tried if size >= larger[0]]:
                continue  # true of some sizes beyond it again, as what is true of multiples: no end of a range
            least = max((size for size in broken if size < traced[name]), default=dim.min - 1) + 1
            most = larger[0] - 1 if larger else dim.max
            if most is None or least < most:
                found[name] = Dim(name, least, most)
    return found


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
        if in_doubt is not _broken or not isinstance(expression, sympy.Equality):
            continue
        groups = [[name] for name in free] + [list(free)]
        larger = [{**traced, **{name: traced[name] * times for name in group}} for group in groups for times in _TIMES]
        allowed = [sizes for sizes in larger if all(sizes[name] <= (dims[name].max or _LARGEST) for name in free)]
        if allowed and all(_broken(expression, {free[name]: sizes[name] for name in free}) for sizes in allowed):
            found |= dict.fromkeys(free, str(expression))
    return found


_TIMES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Doubt:
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
) -> list[Doubt]:
    """Sizes that break an assertion in the graph, or at which another size depends on how a fraction is rounded.

    Args:
        names: The dimension that each of the program's symbols stands for.
        traced: The size of each dimension in the trace.
    """
    doubts: list[Doubt] = []
    for expression, in_doubt, free in _doubts(program, names, dims):
        known = ({name: sizes[name] for name in free} for doubt in doubts for sizes in doubt.sizes)
        # Next to the traced sizes models run; at the smallest few do.
        near = () if _is_exclusion(expression) else _neighbours(list(free), dims, traced)
        ways = [itertools.chain(near, known, _candidates(expression, list(free), dims, traced))]
        if _is_exclusion(expression) and len(free) > 1:  # where all are alike the model may well go another way
            alike = set.intersection(*(set(_sizes(dims[name], expression)) for name in free))
            ways.append(itertools.chain(dict.fromkeys(free, size) for size in sorted(alike)))
        found = [
            {**traced, **sizes}
            for way in ways
            for sizes in itertools.islice(
                (s for s in way if in_doubt(expression, {free[name]: size for name, size in s.items()})), 1
            )
        ]
        if found:
            doubts.append(Doubt(expression, tuple(found), in_doubt is _broken, _is_exclusion(expression)))
    return doubts


def drop_doubts(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], doubts: Collection[Doubt]
) -> None:
    """Takes out, in place, what the graph asserts; the proof is to check the sizes at which it is not so.

    Args:
        names: The dimension that each of the program's symbols stands for.
    """
    _, renamed = _renaming(program, names, dims)
    doubted = {doubt.expression for doubt in doubts}
    if doubted:
        _drop(program, lambda expression: expression.xreplace(renamed) in doubted)


def drop_own_exclusions(program: ExportedProgram) -> None:
    """Takes out, in place, what the export of a graph asserts sizes not to be.

    A graph goes no other way at any size: what operators compute decides, and not what they look at to choose strides.
    """
    _drop(program, lambda expression: _is_exclusion(expression) and not free_unbacked_symbols(expression))


def _drop(program: ExportedProgram, is_dropped: Callable[[Any], bool]) -> None:
    for node in list(program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)):
        asserted = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if isinstance(asserted, torch.SymBool) and is_dropped(asserted.node.expr):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _is_exclusion(expression: Any) -> bool:
    return isinstance(expression, sympy.Unequality)


def _renaming(
    program: ExportedProgram, names: Mapping[Any, str], dims: Collection[str]
) -> tuple[dict[str, sympy.Symbol], dict[Any, Any]]:
    """A symbol for each dimension, and what takes the place of the program's own: these, and sizes that are fixed."""
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in dims}
    fixed = {symbol: limits.lower for symbol, limits in program.range_constraints.items() if limits.is_singleton()}
    return symbols, fixed | {symbol: symbols[name] for symbol, name in names.items() if name in symbols}


_InDoubt = Callable[[Any, dict[sympy.Symbol, int]], bool]


def _doubts(
    program: ExportedProgram, names: Mapping[Any, str], dims: Collection[str]
) -> Iterator[tuple[Any, _InDoubt, dict[str, sympy.Symbol]]]:
    """What is asserted of sizes, and sizes that are computed as fractions; when each is in doubt; and of what sizes."""
    symbols, renamed = _renaming(program, names, dims)
    for doubt, in_doubt in _found_in(program):
        expression = doubt.xreplace(renamed)
        free = {name: symbol for name, symbol in symbols.items() if symbol in expression.free_symbols}
        if free and len(free) == len(expression.free_symbols):
            yield expression, in_doubt, free  # any other is always so, or about a value that only running it tells


def _found_in(program: ExportedProgram) -> Iterator[tuple[Any, _InDoubt]]:
    fractions: dict[Any, None] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target is torch.ops.aten._assert_scalar.default and isinstance(node.args[0], fx.Node):
            asserted = node.args[0].meta.get("val")
            if isinstance(asserted, torch.SymBool):
                yield asserted.node.expr, _broken
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.atoms(*_FLOATS):
                fractions[size.node.expr] = None
    yield from ((expression, _rounded_otherwise) for expression in fractions)


_FLOATS = (sympy.Float, ToFloat, FloatTrueDiv, IntTrueDiv)


def _broken(condition: Any, sizes: dict[sympy.Symbol, int]) -> bool:
    evaluate = _evaluator(condition)
    try:
        if evaluate is not None:
            with contextlib.suppress(NameError):  # in a branch that no size before this one led to
                return not evaluate(sizes)
        return bool(condition.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()}) == sympy.false)
    except ZeroDivisionError:
        return True  # what divides by zero does not hold


_ARITHMETIC = {
    "__builtins__": {function.__name__: function for function in (abs, bool, float, int, max, min, round)},
    "math": math,
}


@functools.lru_cache(maxsize=1024)
def _evaluator(condition: Any) -> Callable[[Mapping[sympy.Symbol, int]], Any] | None:
    """A condition as a function of Python, hundreds of times faster than sympy is; None where it cannot be one."""
    free = list(condition.free_symbols)
    plain = {symbol: sympy.Symbol(f"z{i}", integer=True, positive=True) for i, symbol in enumerate(free)}
    text = PythonPrinter().doprint(condition.xreplace(plain))
    try:
        # Arithmetic that torch prints, on names that were just given. A .pt2 file may bring functions of other names.
        evaluate = eval(f"lambda {', '.join(map(str, plain.values()))}: {text}", dict(_ARITHMETIC))  # noqa: S307
        evaluate(*[64] * len(free))
    except ZeroDivisionError:
        pass
    except Exception:  # a function that Python does not have: sympy knows it
        return None
    return lambda sizes: evaluate(*(sizes[symbol] for symbol in free))


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


def _candidates(
    expression: Any, free: list[str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Sizes to try: each dimension by itself, all of them alike, and all combinations of a few."""
    usual = {name: traced[name] for name in free}
    sizes = {name: _sizes(dims[name], expression) for name in free}
    for name in free:
        yield from ({**usual, name: size} for size in sizes[name])
    if len(free) > 1:
        for size in sorted(set.intersection(*(set(sizes[name]) for name in free))):
            yield dict.fromkeys(free, size)
        few = {name: sizes[name][:_ALL_PAIRS_UP_TO] + sizes[name][-8:] for name in free}
        for combination in itertools.islice(itertools.product(*few.values()), _MOST_COMBINATIONS):
            yield dict(zip(free, combination, strict=True))
    if len(free) == 2:  # of which an equation about a product has no solution among small sizes
        one, other = free
        for product, size in itertools.product(_products(expression), sizes[one]):
            if product % size == 0 and dims[other].min <= product // size <= (dims[other].max or product):
                yield {one: size, other: product // size}


def _products(expression: Any) -> list[int]:
    """The numbers that an expression names, and the products of two and three of them where they are few."""
    numbers = {abs(int(number)) for number in expression.atoms(sympy.Integer)} - {0}
    counts = (1, 2, 3) if len(numbers) <= _MOST_NUMBERS else (1,)
    several = (itertools.combinations_with_replacement(sorted(numbers), count) for count in counts)
    return sorted({product for chosen in several for each in chosen if (product := math.prod(each)) <= _LARGEST})


def _sizes(dim: Dim, expression: Any) -> list[int]:
    most = _LARGEST if dim.max is None else dim.max
    every = _ALL_DECLARED_UP_TO if dim.max is not None and expression.is_Boolean else _ALL_UP_TO
    near = {product * times + step for product in _products(expression) for times in (1, 2) for step in (-1, 0, 1)}
    tried = {*range(1, every + 1), *(2**power + step for power in range(9, 31) for step in (-1, 0, 1)), *near}
    ends = set() if dim.max is None else {dim.max}
    return sorted(size for size in tried | ends if max(dim.min, 1) <= size <= most)
