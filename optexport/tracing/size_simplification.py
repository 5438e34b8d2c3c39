"""Simplifies sizes that are computed from other sizes while torch.export traces.

torch 2.13 does not simplify ``n + (-n) % 4``, which is ``-4 * (-n // 4)``. With padding to a multiple, or the "same"
padding of EfficientNet, sizes then triple in length with every layer, and leave conditions that no solver proves.
Sizes are integers, so every floor division is exact.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sympy
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import (
    CeilToInt,
    CleanDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
)

# Longer sums are not simplified: they come from data-dependent sizes, which nothing cancels.
_MAX_TERMS = 32
# Floor divisions inside of floor divisions to replace by their bounds.
_MAX_DEPTH = 8
_SIMPLIFIED = (CeilToInt, CleanDiv, FloorDiv, FloorToInt, Max, Min, Mod, PythonMod)
_DIVISIONS = (CleanDiv, FloorDiv)


@contextlib.contextmanager
def simplifying_sizes() -> Iterator[None]:
    """Simplifies every size, and every comparison of sizes, that is computed within the block."""
    original = SymNode.__init__

    def simplifying_init(self: SymNode, expr: Any, *args: Any, **kwargs: Any) -> None:
        original(self, simplify(expr) if isinstance(expr, sympy.Basic) and expr.args else expr, *args, **kwargs)

    with mock.patch.object(SymNode, "__init__", simplifying_init):
        yield


@functools.lru_cache(maxsize=4096)
def simplify(expression: Any) -> Any:
    """Returns an equal expression that is shorter, or the expression itself."""
    if not expression.has(*_SIMPLIFIED):
        return expression
    if isinstance(expression, sympy.core.relational.Relational):
        return _decide(expression)
    if not expression.is_integer:
        return expression
    normal = _normal_form(expression)
    return normal if _length(normal) < _length(expression) else expression


def _length(expression: Any) -> tuple[int, int]:
    """Returns how often symbols occur in an expression, and the number of its parts."""
    parts = list(sympy.preorder_traversal(expression))
    return sum(1 for part in parts if part.is_Symbol), len(parts)


def _decide(condition: Any) -> Any:
    """Returns true or false for a comparison that the bounds of a difference decide, or the comparison itself."""
    if not (condition.lhs.is_integer and condition.rhs.is_integer):
        return condition
    lower, upper = _bounds(_normal_form(condition.lhs - condition.rhs))
    is_less, is_equal, is_greater = upper < 0, lower == upper == 0, lower > 0
    decided = {
        sympy.Eq: (is_equal, is_less or is_greater),
        sympy.Ne: (is_less or is_greater, is_equal),
        sympy.Gt: (is_greater, upper <= 0),
        sympy.Ge: (lower >= 0, is_less),
        sympy.Lt: (is_less, lower >= 0),
        sympy.Le: (upper <= 0, is_greater),
    }.get(type(condition), (False, False))
    return sympy.true if decided[0] else sympy.false if decided[1] else condition


@functools.lru_cache(maxsize=4096)
def _normal_form(expression: Any) -> Any:
    """Returns an equal expression with floor divisions instead of remainders, and with few maxima."""
    if not expression.args or not expression.has(*_SIMPLIFIED):
        return expression
    arguments = [_normal_form(argument) for argument in expression.args]
    if isinstance(expression, CeilToInt | FloorToInt) and isinstance(arguments[0], IntTrueDiv):
        number, divisor = arguments[0].args
        if _is_divisor(divisor):
            return -_divide(-number, divisor) if isinstance(expression, CeilToInt) else _divide(number, divisor)
    if isinstance(expression, Mod | PythonMod) and _is_divisor(arguments[1]):
        number, divisor = arguments
        return _expand(number - divisor * _divide(number, divisor))
    if isinstance(expression, _DIVISIONS) and _is_divisor(arguments[1]):
        return _divide(*arguments)
    if isinstance(expression, Max | Min):
        return _choose(type(expression), arguments)
    result = expression.func(*arguments)
    return _expand(result) if isinstance(result, sympy.Add | sympy.Mul) else result


def _is_divisor(value: Any) -> bool:
    return bool(value.is_Integer and value > 0)


def _expand(expression: Any) -> Any:
    return sympy.expand_mul(expression)


def _divide(number: Any, divisor: Any) -> Any:
    """Returns a floor division by an integer, and takes multiples of the divisor out of it."""
    number = _expand(number)
    if number.is_Integer:
        return number // divisor
    quotient, rest = sympy.S.Zero, sympy.S.Zero
    for term in number.args if isinstance(number, sympy.Add) else (number,):
        factor, others = term.as_coeff_Mul()
        if not factor.is_Integer:
            return FloorDiv(number, divisor)
        if term.is_Integer or factor % divisor == 0:
            quotient += factor // divisor * others
            rest += factor % divisor * others
        else:
            rest += term
    if rest.is_Integer:
        return quotient + rest // divisor
    # floor((floor(a / n) + c) / m) is floor((a + c * n) / (n * m)), and -floor(a / n) is floor((n - 1 - a) / n).
    constant, division = rest.as_coeff_Add()
    factor, division = division.as_coeff_Mul()
    if isinstance(division, FloorDiv) and _is_divisor(division.args[1]) and abs(factor) == 1:
        inner, by = division.args
        inner = inner if factor == 1 else by - 1 - inner
        return quotient + _divide(inner + constant * by, by * divisor)
    return quotient + FloorDiv(rest, divisor)


def _choose(function: Any, arguments: list[Any]) -> Any:
    """Returns a maximum or minimum without the arguments that others exceed."""
    remaining = list(dict.fromkeys(arguments))
    for one in arguments:
        for other in [value for value in remaining if value != one]:
            difference = one - other if function is Max else other - one
            if one in remaining and _bounds(_normal_form(difference))[0] >= 0:
                remaining.remove(other)
    return remaining[0] if len(remaining) == 1 else function(*remaining)


@functools.lru_cache(maxsize=4096)
def _bounds(expression: Any) -> tuple[Any, Any]:
    """Returns a lower and an upper bound of an expression in normal form."""
    lower = upper = sympy.S.Zero
    for _ in range(_MAX_DEPTH):
        terms = expression.args if isinstance(expression, sympy.Add) else (expression,)
        divisions = [term for term in terms if _division_of(term) is not None]
        if not divisions or len(terms) > _MAX_TERMS:
            break
        # floor(a / n) is a / n - r, with r from 0 to (n - 1) / n. The outermost divisions come first.
        term = max(divisions, key=_length)
        factor, division = term.as_coeff_Mul()
        number, divisor = division.args
        rest = factor * (divisor - 1) / divisor
        lower, upper = lower - max(rest, 0), upper - min(rest, 0)
        expression = _expand(expression - term + factor * number / divisor)
    for term in expression.args if isinstance(expression, sympy.Add) else (expression,):
        factor, value = term.as_coeff_Mul()
        ends = _ends(value)
        low, high = ends if factor >= 0 else (ends[1], ends[0])
        lower, upper = lower + factor * low, upper + factor * high
    return sympy.ceiling(lower), sympy.floor(upper)


def _division_of(term: Any) -> Any:
    division = term.as_coeff_Mul()[1]
    return division if isinstance(division, FloorDiv) and _is_divisor(division.args[1]) else None


def _ends(value: Any) -> tuple[Any, Any]:
    """Returns the bounds of a value that is no sum and no floor division."""
    if value.is_number:
        return value, value
    if isinstance(value, Max | Min):
        lowers, uppers = zip(*map(_bounds, value.args), strict=True)
        choose = max if isinstance(value, Max) else min
        return choose(lowers), choose(uppers)
    lower = sympy.S.One if value.is_positive else sympy.S.Zero if value.is_nonnegative else -sympy.oo
    return lower, sympy.oo
