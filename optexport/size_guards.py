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

# Of every dimension, all sizes up to so many are tried, and beyond it powers of two and what is next to them.
_ALL_UP_TO = 512


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
        for sizes in _candidates(free, dims, traced):
            if expression.xreplace({symbols[name]: sympy.Integer(sizes[name]) for name in free}) == sympy.false:
                found.append({**traced, **sizes})
                break
    return tuple(found)


def _conditions(program: ExportedProgram) -> Iterator[Any]:
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        if isinstance(value, torch.SymBool):
            yield value.node.expr


def _candidates(free: list[str], dims: Mapping[str, Dim], traced: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes to try: each dimension by itself, then all of them alike."""
    for name in free:
        yield from ({**{other: traced[other] for other in free}, name: size} for size in _sizes(dims[name]))
    if len(free) > 1:
        for size in range(1, _ALL_UP_TO):
            if all(dims[name].min <= size <= (dims[name].max or size) for name in free):
                yield dict.fromkeys(free, size)


def _sizes(dim: Dim) -> Iterable[int]:
    most = dim.max if dim.max is not None else 8 * _ALL_UP_TO
    beyond = (2**power + step for power in range(9, most.bit_length() + 1) for step in (-1, 0, 1))
    return itertools.chain(
        range(max(dim.min, 1), min(most, _ALL_UP_TO) + 1),
        (size for size in beyond if _ALL_UP_TO < size <= most),
        [most],
    )
