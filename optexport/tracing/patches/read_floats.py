"""Keeps a trace from deciding comparisons of floats that a model reads from tensors.

``torch.export`` treats ``v = x.max().item()`` as a real number: ``v != v`` is False, although v may be NaN, and
``v + 0.1 - 0.1 == v`` is True in spite of rounding. A branch on such a comparison would be lost.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.symbol import SymT, symbol_is_type

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "mod", "float_truediv", "float_pow", "neg", "abs", "sym_min", "sym_max")


@contextlib.contextmanager
def forgetting_values(*, is_strict: bool) -> Iterator[None]:
    """Makes every result of a function of such floats a new unknown within the block. The graph is the same.

    Args:
        is_strict: Whether TorchDynamo traces the model. It needs the expressions, and compares numbers with themselves;
            only the comparisons of two numbers that would be decided become unknown.
    """
    with contextlib.ExitStack() as stack:
        for name in _COMPARISONS if is_strict else (*_COMPARISONS, *_ARITHMETIC):
            method = _forgetting(name, is_strict=is_strict)
            stack.enter_context(mock.patch.object(SymNode, f"_{name}", method))
        yield


def _forgetting(name: str, *, is_strict: bool) -> Callable[..., Any]:
    method = getattr(SymNode, f"_{name}")

    @functools.wraps(method)
    def call(*nodes: Any) -> Any:
        if name in ("eq", "ne") and nodes[0].pytype is bool:
            return _compare_bools(*nodes, is_equal=name == "eq") or method(*nodes)
        result = method(*nodes)
        if is_strict and nodes[0] is nodes[-1] and _is_check_of_dynamo():
            return result
        # A tracer calls the method again to compute the result.
        if get_proxy_mode() is not None or not isinstance(result, SymNode) or not any(map(_is_read, nodes)):
            return result
        if not is_strict or result._expr in (sympy.true, sympy.false):
            environment: Any = result.shape_env
            with environment.ignore_fresh_unbacked_symbols():
                unknown = environment.create_unbacked_symfloat().node.expr
            result._expr = sympy.Gt(unknown, 0) if result.pytype is bool else unknown
        return result

    return call


def _is_check_of_dynamo() -> bool:
    """Returns True if TorchDynamo itself compares a number, to check its record of it, and not the model."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == inspect.getfile(SymNode):
        frame = frame.f_back
    return frame.f_code.co_filename == inspect.getfile(SymNodeVariable)


def _compare_bools(a: Any, b: Any, *, is_equal: bool) -> Any:
    """Compares a condition with True, False, 1 or 0, which sympy cannot; returns None for another operand."""
    if b._expr in (sympy.true, sympy.S.One):
        return a if is_equal else a.sym_not()
    if b._expr in (sympy.false, sympy.S.Zero):
        return a.sym_not() if is_equal else a
    return None


def _is_read(node: Any) -> bool:
    if not isinstance(node, SymNode) or node.pytype is not float:
        return False
    return any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in node.expr.free_symbols)
