"""Evaluates conditions on sizes, and lists sizes that may break a condition."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean
from torch.utils._sympy.printers import PythonPrinter

from optexport.signature.signature import Dim

# For each dimension, all sizes up to this one are tried (or up to the second, if its range was declared). Larger sizes
# are powers of two, the numbers in the condition, their products, and the neighbors of all these.
_ALL_UP_TO = 512
_ALL_DECLARED_UP_TO = 4096
_ALL_PAIRS_UP_TO = 64
_MAX_COMBINATIONS = 8192
_RANDOM_COMBINATIONS = 2048
_MAX_NUMBERS_FOR_PRODUCTS = 6
LARGEST = 2**20


def is_broken(condition: Any, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Returns True if a condition is known to be false at some sizes."""
    evaluator = _evaluator(condition)
    return evaluator.is_broken([sizes[symbol] for symbol in evaluator.symbols])


def is_broken_at(condition: Any, sizes: Mapping[str, int]) -> bool:
    """Does the same as `is_broken` for a condition whose symbols are named like dimensions."""
    evaluator = _evaluator(condition)
    return evaluator.is_broken([sizes[name] for name in evaluator.names])


class _Evaluator:
    """A condition with its sorted symbols; sympy would search for these at every call.

    Attributes:
        evaluate: The condition as a Python function, hundreds of times faster than sympy; None if it cannot be one.
    """

    def __init__(self, condition: Any) -> None:
        self.condition = condition
        self.symbols = sorted(condition.free_symbols, key=str)
        self.names = [symbol.name for symbol in self.symbols]
        self.evaluate = _function(condition, self.symbols)

    def is_broken(self, sizes: Sequence[int]) -> bool:
        try:
            if self.evaluate is not None:
                with contextlib.suppress(NameError):  # a branch calls a function that Python does not have
                    return not self.evaluate(*sizes)
            values = {symbol: sympy.Integer(size) for symbol, size in zip(self.symbols, sizes, strict=True)}
            return bool(self.condition.xreplace(values) == sympy.false)
        except ZeroDivisionError:
            return True  # a condition that divides by zero is false


_evaluator = functools.lru_cache(maxsize=1024)(_Evaluator)

_ARITHMETIC = {
    "__builtins__": {function.__name__: function for function in (abs, bool, float, int, max, min, round)},
    "math": math,
}


def _function(condition: Any, symbols: Sequence[sympy.Symbol]) -> Callable[..., Any] | None:
    renamed = {symbol: sympy.Symbol(f"z{i}", integer=True, positive=True) for i, symbol in enumerate(symbols)}
    text = PythonPrinter().doprint(condition.xreplace(renamed))
    try:
        # The text is arithmetic printed by torch. A .pt2 file may contain functions with other names, so only
        # arithmetic is in scope.
        evaluate = eval(f"lambda {', '.join(map(str, renamed.values()))}: {text}", dict(_ARITHMETIC))  # noqa: S307
        evaluate(*[64] * len(symbols))
    except ZeroDivisionError:
        pass
    except Exception:  # a function that only sympy has
        return None
    function: Callable[..., Any] = evaluate
    return function


def candidates(
    expression: Any, free: list[str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Yields sizes to try: each dimension alone, all dimensions equal, and combinations.

    Combinations are of small sizes, of extreme sizes, of sizes whose product the expression names, and random ones.

    Args:
        free: The dimensions in the expression.
        traced: The traced size of each dimension.
    """
    usual = {name: traced[name] for name in free}
    sizes = {name: sizes_to_try(dims[name], expression) for name in free}
    for name in free:
        yield from ({**usual, name: size} for size in sizes[name])
    if len(free) > 1:
        for size in sorted(set.intersection(*(set(sizes[name]) for name in free))):
            yield dict.fromkeys(free, size)
        small = {name: sizes[name][:_ALL_PAIRS_UP_TO] + sizes[name][-8:] for name in free}
        for combination in itertools.islice(itertools.product(*small.values()), _MAX_COMBINATIONS):
            yield dict(zip(free, combination, strict=True))
        # An equation about a product may have no solution among small sizes.
        splits = (_split(product, free, sizes, dims) for product in _products(expression))
        yield from itertools.islice(itertools.chain.from_iterable(splits), _MAX_COMBINATIONS)
        corners = itertools.product(*((size[0], usual[name], size[-1]) for name, size in sizes.items()))
        generator = random.Random(0)  # noqa: S311
        drawn = ([generator.choice(size) for size in sizes.values()] for _ in range(_RANDOM_COMBINATIONS))
        combinations = [*itertools.islice(corners, _MAX_COMBINATIONS), *drawn]
        yield from (dict(zip(free, combination, strict=True)) for combination in sorted(combinations, key=math.prod))


def _split(
    product: int, names: list[str], sizes: Mapping[str, list[int]], dims: Mapping[str, Dim]
) -> Iterator[dict[str, int]]:
    """Yields sizes of several dimensions with a given product."""
    first, *other_names = names
    if not other_names:
        if product in dims[first]:
            yield {first: product}
        return
    for size in sizes[first]:
        if product % size == 0:
            yield from ({first: size, **rest} for rest in _split(product // size, other_names, sizes, dims))


def _products(expression: Any) -> list[int]:
    """Returns the numbers in an expression, and products of two and three of them."""
    numbers = {abs(int(number)) for number in expression.atoms(sympy.Integer)} - {0}
    counts = (1, 2, 3) if len(numbers) <= _MAX_NUMBERS_FOR_PRODUCTS else (1,)
    groups = (itertools.combinations_with_replacement(sorted(numbers), count) for count in counts)
    return sorted({product for group in groups for factors in group if (product := math.prod(factors)) <= LARGEST})


def sizes_to_try(dim: Dim, expression: Any) -> list[int]:
    """Returns the sizes of a dimension at which to evaluate an expression, in ascending order."""
    maximum = LARGEST if dim.max is None else dim.max
    all_up_to = _ALL_DECLARED_UP_TO if dim.max is not None and isinstance(expression, Boolean) else _ALL_UP_TO
    near = {product * times + step for product in _products(expression) for times in (1, 2) for step in (-1, 0, 1)}
    sizes = {*range(1, all_up_to + 1), *(2**power + step for power in range(9, 31) for step in (-1, 0, 1)), *near}
    ends = set() if dim.max is None else {dim.max}
    multiples = {size // dim.multiple_of * dim.multiple_of for size in sizes | ends}
    return sorted(size for size in multiples if max(dim.min, 1) <= size <= maximum)
