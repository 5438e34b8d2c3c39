"""Sizes at which a trace may not hold, because the model chose its way by the size that it was traced with.

``if n % 8 == 0`` is traced in one direction only, and leaves an assertion in the graph that other sizes break. The file
formats drop such assertions, so the sizes that break them are checked on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram

from optexport.signature import Dim

# Of every dimension, all sizes up to so many are tried; beyond it powers of two, the numbers that the assertion names,
# and what is next to them.
_ALL_UP_TO = 512
_ALL_PAIRS_UP_TO = 64
_MOST_COMBINATIONS = 8192
_LARGEST = 2**20


def doubtful_sizes(
    program: ExportedProgram, names: Mapping[Any, str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> tuple[dict[str, int], ...]:
    """For every assertion on sizes that not all declared sizes keep, sizes that break it.

    Args:
        names: The dimension that each of the program's symbols stands for.
        traced: The size of each dimension in the trace.
    """
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in dims}
    renamed = {symbol: symbols[name] for symbol, name in names.items()}
    found: list[dict[str, int]] = []
    for condition in _conditions(program):
        expression = condition.xreplace(renamed)
        free = [name for name, symbol in symbols.items() if symbol in expression.free_symbols]
        if not free or len(free) < len(expression.free_symbols):
            continue  # always so, or about a value that only running it tells
        if any(expression.xreplace({symbols[name]: sizes[name] for name in free}) == sympy.false for sizes in found):
            continue
        for sizes in _candidates(expression, free, dims, traced):
            if expression.xreplace({symbols[name]: sympy.Integer(sizes[name]) for name in free}) == sympy.false:
                found.append({**traced, **sizes})
                break
    return tuple(found)


def _conditions(program: ExportedProgram) -> Iterator[Any]:
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if isinstance(value, torch.SymBool):
            yield value.node.expr


def _candidates(
    expression: Any, free: list[str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Sizes to try: each dimension by itself, all of them alike, and all combinations of a few."""
    usual = {name: traced[name] for name in free}
    numbers = [abs(int(number)) for number in expression.atoms(sympy.Integer) if abs(int(number)) < _LARGEST]
    near = {number * times + step for number in numbers for times in (1, 2) for step in (-1, 0, 1)}
    sizes = {name: _sizes(dims[name], near) for name in free}
    for name in free:
        yield from ({**usual, name: size} for size in sizes[name])
    if len(free) > 1:
        for size in sorted(set.intersection(*(set(sizes[name]) for name in free))):
            yield dict.fromkeys(free, size)
        few = {name: sizes[name][:_ALL_PAIRS_UP_TO] + sizes[name][-8:] for name in free}
        for combination in itertools.islice(itertools.product(*few.values()), _MOST_COMBINATIONS):
            yield dict(zip(free, combination, strict=True))


def _sizes(dim: Dim, near: Iterable[int]) -> list[int]:
    most = _LARGEST if dim.max is None else dim.max
    tried = {*range(1, _ALL_UP_TO + 1), *(2**power + step for power in range(9, 31) for step in (-1, 0, 1)), *near}
    ends = set() if dim.max is None else {dim.max}
    return sorted(size for size in tried | ends if max(dim.min, 1) <= size <= most)
