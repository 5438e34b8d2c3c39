"""Checks of values that a model makes, and a trace passes over: it knows no values, and nothing else hangs on them."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections.abc import Iterator
from typing import Any

from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from optexport.model_lines import is_of_model


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


def _that_passes() -> bool | None:
    """What the condition is where the check passes that the model's innermost line makes; None where it makes none."""
    frame = sys._getframe(2)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return _checks(frame.f_code.co_filename).get(frame.f_lineno)


@functools.lru_cache(maxsize=64)
def _checks(filename: str) -> dict[int, bool]:
    """The lines of a file that do nothing but check one condition, with what it is where it passes."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # as a notebook's cells may have
        return {}
    lines: dict[int, bool] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assert):
            lines |= _when(statement.test, passes=True)
        elif isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Raise):
            lines |= _when(statement.test, passes=False)
    return lines


def _when(test: ast.expr, *, passes: bool) -> dict[int, bool]:
    """What is to be answered, on each line of a test, to have it come out as it passes, if any answer will do."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _when(test.operand, passes=not passes)
    if any(isinstance(part, ast.Not) for part in ast.walk(test)):
        return {}
    return dict.fromkeys(range(test.lineno, (test.end_lineno or test.lineno) + 1), passes)
