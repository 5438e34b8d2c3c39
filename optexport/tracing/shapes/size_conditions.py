"""Conditions on sizes: whether they hold, and the sizes that are tried to find out where they do not."""

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

# Of every dimension, all sizes up to so many are tried, of one whose range is declared more; beyond it powers of two,
# the numbers that the assertion names, their products, and what is next to them.
_ALL_UP_TO = 512
_ALL_DECLARED_UP_TO = 4096
_ALL_PAIRS_UP_TO = 64
_MOST_COMBINATIONS = 8192
_DRAWN = 2048
_MOST_NUMBERS = 6
LARGEST = 2**20


def is_broken(condition: Any, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a condition is known not to hold at sizes."""
    known = _evaluator(condition)
    return known.is_broken([sizes[symbol] for symbol in known.free])


def is_broken_at(condition: Any, sizes: Mapping[str, int]) -> bool:
    """The same, of a condition whose symbols have the names of dimensions."""
    known = _evaluator(condition)
    return known.is_broken([sizes[name] for name in known.names])


class _Evaluator:
    """A condition with its symbols, which sympy looks for anew each time that it is asked.

    Attributes:
        evaluate: The condition as a function of Python, hundreds of times faster than sympy is; None where it cannot
            be one.
    """

    def __init__(self, condition: Any) -> None:
        self.condition = condition
        self.free = sorted(condition.free_symbols, key=str)
        self.names = [symbol.name for symbol in self.free]
        self.evaluate = _function(condition, self.free)

    def is_broken(self, sizes: Sequence[int]) -> bool:
        try:
            if self.evaluate is not None:
                with contextlib.suppress(NameError):  # in a branch that no size before this one led to
                    return not self.evaluate(*sizes)
            given = {symbol: sympy.Integer(size) for symbol, size in zip(self.free, sizes, strict=True)}
            return bool(self.condition.xreplace(given) == sympy.false)
        except ZeroDivisionError:
            return True  # what divides by zero does not hold


_evaluator = functools.lru_cache(maxsize=1024)(_Evaluator)

_ARITHMETIC = {
    "__builtins__": {function.__name__: function for function in (abs, bool, float, int, max, min, round)},
    "math": math,
}


def _function(condition: Any, free: Sequence[sympy.Symbol]) -> Callable[..., Any] | None:
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
    function: Callable[..., Any] = evaluate
    return function


def candidates(
    expression: Any, free: list[str], dims: Mapping[str, Dim], traced: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Sizes to try: each dimension by itself, all of them alike, and combinations of small, of extreme and of any."""
    usual = {name: traced[name] for name in free}
    sizes = {name: sizes_to_try(dims[name], expression) for name in free}
    for name in free:
        yield from ({**usual, name: size} for size in sizes[name])
    if len(free) > 1:
        for size in sorted(set.intersection(*(set(sizes[name]) for name in free))):
            yield dict.fromkeys(free, size)
        few = {name: sizes[name][:_ALL_PAIRS_UP_TO] + sizes[name][-8:] for name in free}
        for combination in itertools.islice(itertools.product(*few.values()), _MOST_COMBINATIONS):
            yield dict(zip(free, combination, strict=True))
    if len(free) > 1:  # of which an equation about a product has no solution among small sizes
        splits = (_split(product, free, sizes, dims) for product in _products(expression))
        yield from itertools.islice(itertools.chain.from_iterable(splits), _MOST_COMBINATIONS)
        corners = itertools.product(*((size[0], usual[name], size[-1]) for name, size in sizes.items()))
        drawn = random.Random(0)  # noqa: S311
        others = ([drawn.choice(size) for size in sizes.values()] for _ in range(_DRAWN))
        combinations = [*itertools.islice(corners, _MOST_COMBINATIONS), *others]
        yield from (dict(zip(free, each, strict=True)) for each in sorted(combinations, key=math.prod))


def _split(
    product: int, names: list[str], sizes: Mapping[str, list[int]], dims: Mapping[str, Dim]
) -> Iterator[dict[str, int]]:
    """Sizes of several dimensions whose product it is."""
    first, *others = names
    if not others:
        if dims[first].min <= product <= (dims[first].max or product):
            yield {first: product}
        return
    for size in sizes[first]:
        if product % size == 0:
            yield from ({first: size, **rest} for rest in _split(product // size, others, sizes, dims))


def _products(expression: Any) -> list[int]:
    """The numbers that an expression names, and the products of two and three of them where they are few."""
    numbers = {abs(int(number)) for number in expression.atoms(sympy.Integer)} - {0}
    counts = (1, 2, 3) if len(numbers) <= _MOST_NUMBERS else (1,)
    several = (itertools.combinations_with_replacement(sorted(numbers), count) for count in counts)
    return sorted({product for chosen in several for each in chosen if (product := math.prod(each)) <= LARGEST})


def sizes_to_try(dim: Dim, expression: Any) -> list[int]:
    """Sizes of a dimension at which an expression is looked at, in order."""
    most = LARGEST if dim.max is None else dim.max
    every = _ALL_DECLARED_UP_TO if dim.max is not None and isinstance(expression, Boolean) else _ALL_UP_TO
    near = {product * times + step for product in _products(expression) for times in (1, 2) for step in (-1, 0, 1)}
    tried = {*range(1, every + 1), *(2**power + step for power in range(9, 31) for step in (-1, 0, 1)), *near}
    ends = set() if dim.max is None else {dim.max}
    return sorted(size for size in tried | ends if max(dim.min, 1) <= size <= most)
