"""Checks of values that a model makes, and a trace passes over: it knows no values, and nothing else hangs on them."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.export import _trace
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from optexport.tracing.model_lines import is_of_model


@contextlib.contextmanager
def skipping_checks() -> Iterator[None]:
    """Within it, ``if CONDITION: raise ...`` and ``assert CONDITION`` go on where a trace cannot tell.

    That is how every export goes on behind a check that it cannot make, as ``torch._check`` does without a value.
    """
    guard_bool = SymNode.guard_bool

    def patched(node: SymNode, *args: Any) -> bool:
        try:
            return guard_bool(node, *args)
        except GuardOnDataDependentSymNode:
            passes = _that_passes()
            if passes is None:
                raise
            return passes

    SymNode.guard_bool = patched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SymNode.guard_bool = guard_bool  # type: ignore[method-assign]


# The call of the model comes from there.
_TRACED_FROM = _trace.__file__

# Context managers that models use, and that hand on what is raised within them.
_LETTING_THROUGH = {
    *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "maybe_autocast"),
    *("device", "stream", "nullcontext", "record_function", "sdpa_kernel", "catch_warnings", "fork_rng"),
}

_Span = tuple[int | None, int | None, int | None, int | None]


def _that_passes() -> bool | None:
    """What the condition is where the check passes that the model's innermost line makes; None where it makes none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<"):  # a model's code whose lines nobody has
            return None
        frame = frame.f_back
    if frame is None or _is_protocol(frame.f_code.co_name):
        return None
    at = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    passes = _checks(frame.f_code.co_filename).conditions.get((at[0], at[2], at[1], at[3]))
    return None if passes is None or _is_caught(frame) else passes


def _is_protocol(function: str) -> bool:
    """Whether Python itself calls a function, and makes something of what it raises, as of the end of an iterator."""
    return function.startswith("__") and function not in ("__call__", "__init__")


def _is_caught(frame: FrameType | None) -> bool:
    """Whether the model itself goes on where something is raised, in a function or in those that called it."""
    while frame is not None and frame.f_code.co_filename != _TRACED_FROM:
        name = frame.f_code.co_filename
        if is_of_model(name) and any(frame.f_lineno in lines for lines in _checks(name).caught):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class _Checks:
    """What a file's lines check.

    Attributes:
        conditions: Where each condition stands that does nothing but raise, with what it is where the check passes.
        caught: Lines on which what is raised may end somewhere else than in an error.
    """

    conditions: dict[_Span, bool] = field(default_factory=dict)
    caught: list[range] = field(default_factory=list)


@functools.lru_cache(maxsize=64)
def _checks(filename: str) -> _Checks:
    source = "".join(linecache.getlines(filename))
    found = _Checks()
    try:
        tree = ast.parse(source)
    except SyntaxError:  # as a notebook's cells may have
        return found
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assert):
            found.conditions.update(_when(statement, statement.test, passes=True))
        elif isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Raise):
            found.conditions.update(_when(statement, statement.test, passes=False))
        elif isinstance(statement, ast.Try | ast.TryStar):
            goes_on = [handler for handler in statement.handlers if not isinstance(handler.body[-1], ast.Raise)]
            if goes_on or _leaves(statement.finalbody):
                found.caught.append(_lines(statement.body))
        elif isinstance(statement, ast.With) and not all(_lets_through(item.context_expr) for item in statement.items):
            found.caught.append(_lines(statement.body))
    return found


def _lets_through(manager: ast.expr) -> bool:
    """Whether a context manager is known to end nothing that is raised within it, by its name: any other may."""
    named = manager.func if isinstance(manager, ast.Call) else manager
    return ast.unparse(named).rpartition(".")[2] in _LETTING_THROUGH


def _lines(body: Sequence[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether statements may end what is being raised."""
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(part, leaving) for statement in body for part in ast.walk(statement))


def _when(statement: ast.stmt, test: ast.expr, *, passes: bool) -> dict[_Span, bool]:
    """What is to be answered, wherever a test is asked, to have it come out as it passes, if any answer will do."""
    places = [_span(statement), _span(test)]  # Python tells one or the other
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, passes = test.operand, not passes
        places.append(_span(test))
    if any(isinstance(part, ast.Not | ast.IfExp) for part in ast.walk(test)):
        return {}
    operands = [test]
    for operand in operands:
        operands += operand.values if isinstance(operand, ast.BoolOp) else []
    return dict.fromkeys([*places, *map(_span, operands)], passes)


def _span(node: ast.stmt | ast.expr) -> _Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
