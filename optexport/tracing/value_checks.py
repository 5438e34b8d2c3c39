"""Skips a model's checks of tensor values in a trace, which does not know these values.

Only checks that do nothing but raise are skipped: ``if x.isnan().any(): raise ...`` and ``assert x.max() < 10``.
"""

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

from optexport._utils.user_lines import is_user_code


@contextlib.contextmanager
def skip_value_checks() -> Iterator[None]:
    """Assumes that ``if CONDITION: raise ...`` and ``assert CONDITION`` pass in the block.

    ``torch._check`` does the same if its condition is unknown.
    """
    guard_bool = SymNode.guard_bool

    def skipping_guard_bool(node: SymNode, *args: Any) -> bool:
        try:
            return guard_bool(node, *args)
        except GuardOnDataDependentSymNode:
            answer = _passing_answer()
            if answer is None:
                raise
            return answer

    SymNode.guard_bool = skipping_guard_bool  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SymNode.guard_bool = guard_bool  # type: ignore[method-assign]


# The file of torch.export that calls the model.
_TRACE_FILE = _trace.__file__

# Context managers in models that do not suppress exceptions.
_TRANSPARENT_MANAGERS = {
    *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "maybe_autocast"),
    *("device", "stream", "nullcontext", "record_function", "sdpa_kernel", "catch_warnings", "fork_rng"),
}

_Span = tuple[int | None, int | None, int | None, int | None]


def _passing_answer() -> bool | None:
    """Returns the passing value of the check in the model's innermost line, if it is a check."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<"):  # the model's code has no source file
            return None
        frame = frame.f_back
    if frame is None or _is_special_method(frame.f_code.co_name):
        return None
    line, end_line, column, end_column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    answer = _checks(frame.f_code.co_filename).conditions.get((line, column, end_line, end_column))
    return None if answer is None or _is_caught(frame) else answer


def _is_special_method(function: str) -> bool:
    """Returns True for methods whose exceptions Python may handle, such as ``__next__``."""
    return function.startswith("__") and function not in ("__call__", "__init__")


def _is_caught(frame: FrameType | None) -> bool:
    """Returns True if the model may catch an exception, in a frame or in its callers."""
    while frame is not None and frame.f_code.co_filename != _TRACE_FILE:
        name = frame.f_code.co_filename
        if is_user_code(name) and any(frame.f_lineno in lines for lines in _checks(name).caught):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class _Checks:
    """The checks in a source file.

    Attributes:
        conditions: The position of each condition of a check, with its value if the check passes.
        caught: Lines whose exceptions may be caught or suppressed.
    """

    conditions: dict[_Span, bool] = field(default_factory=dict)
    caught: list[range] = field(default_factory=list)


@functools.lru_cache(maxsize=64)
def _checks(filename: str) -> _Checks:
    source = "".join(linecache.getlines(filename))
    checks = _Checks()
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a notebook cell may contain IPython commands
        return checks
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assert):
            checks.conditions.update(_answers(statement, statement.test, passing=True))
        elif isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[0], ast.Raise):
            checks.conditions.update(_answers(statement, statement.test, passing=False))
        elif isinstance(statement, ast.Try | ast.TryStar):
            catching = [handler for handler in statement.handlers if not isinstance(handler.body[-1], ast.Raise)]
            if catching or _may_suppress(statement.finalbody):
                checks.caught.append(_lines(statement.body))
        elif isinstance(statement, ast.With) and not all(
            _is_transparent(item.context_expr) for item in statement.items
        ):
            checks.caught.append(_lines(statement.body))
    return checks


def _is_transparent(manager: ast.expr) -> bool:
    """Returns True for context managers that are known not to suppress exceptions."""
    function = manager.func if isinstance(manager, ast.Call) else manager
    return ast.unparse(function).rpartition(".")[2] in _TRANSPARENT_MANAGERS


def _lines(body: Sequence[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)


def _may_suppress(body: Sequence[ast.stmt]) -> bool:
    """Returns True if statements of a ``finally`` block may suppress an exception."""
    exits = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(part, exits) for statement in body for part in ast.walk(statement))


def _answers(statement: ast.stmt, test: ast.expr, *, passing: bool) -> dict[_Span, bool]:
    """Returns an answer for each part of a test, with which the whole test passes.

    The result is empty if the parts would need different answers.
    """
    spans = [_span(statement), _span(test)]  # Python versions differ in the position that they report
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, passing = test.operand, not passing
        spans.append(_span(test))
    if any(isinstance(part, ast.Not | ast.IfExp) for part in ast.walk(test)):
        return {}
    operands = [test]
    for operand in operands:
        operands += operand.values if isinstance(operand, ast.BoolOp) else []
    return dict.fromkeys([*spans, *map(_span, operands)], passing)


def _span(node: ast.stmt | ast.expr) -> _Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
