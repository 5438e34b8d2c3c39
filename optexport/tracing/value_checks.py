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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import fx
from torch.export import ExportedProgram, _trace
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._sympy.symbol import SymT, symbol_is_type

from optexport._utils.user_lines import describe_frame, find_node_line, find_user_frame, is_user_code
from optexport.transformations.analysis import effects


@contextlib.contextmanager
def skip_value_checks() -> Iterator[dict[str, None]]:
    """Assumes that ``if CONDITION: raise ...`` and ``assert CONDITION`` pass in the block.

    ``torch._check`` does the same if its condition is unknown. Yields the lines of the skipped checks, as keys.
    """
    guard_bool, expect_true = SymNode.guard_bool, SymNode.expect_true
    lines: dict[str, None] = {}

    def skipping_expect_true(node: SymNode, *args: Any) -> bool:
        if not any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in node.expr.free_symbols):
            return expect_true(node, *args)  # about a size, or kept until the end of the trace
        if (frame := find_user_frame(sys._getframe(1), stop=_TRACE_FILE.__eq__)) is not None:
            lines[describe_frame(frame)] = None
        return True

    def skipping_guard_bool(node: SymNode, *args: Any) -> bool:
        try:
            return guard_bool(node, *args)
        except GuardOnDataDependentSymNode:
            frame = find_user_frame(sys._getframe(1), stop=_TRACE_FILE.__eq__)
            answer = None if frame is None else _passing_answer(frame)
            if frame is None or answer is None:
                raise
            lines[describe_frame(frame)] = None
            return answer

    with (
        mock.patch.object(SymNode, "guard_bool", skipping_guard_bool),
        mock.patch.object(SymNode, "expect_true", skipping_expect_true),
    ):
        yield lines


def drop_value_assertions(program: ExportedProgram, lines: dict[str, None]) -> None:
    """Removes the assertions about values that nothing else in a program needs.

    ``torch._check`` and ``torch._assert_async`` write some, and so does torch.export for a bool that is read from a
    tensor: ``sym_ite(flag, 1, 0) <= 1``, which no format can store.

    Args:
        lines: The lines of the skipped checks, as keys. Those of the removed assertions are added.
    """
    graph = program.graph
    scalar = graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    tensor = [node for target in _TENSOR_ASSERTIONS for node in graph.find_nodes(op="call_function", target=target)]
    if not scalar and not tensor:
        return
    asserted = {*tensor, *scalar}
    needed = {*_ancestors([node for node in graph.nodes if node.is_impure() and node not in asserted])}
    read = {node: [n for n in _ancestors([node]) if "unbacked_bindings" in n.meta] for node in asserted}
    of_sizes = [node for node in scalar if needed.issuperset(read[node])]
    # Each way of a branch repeats them. Those of a way that was merged with another are no checks.
    size_lines = {find_node_line(source.stack_trace) for node in of_sizes for source in read[node]}
    for node in (node for node in (*tensor, *scalar) if node not in of_sizes):
        if node in tensor or _is_check(node):
            line = find_node_line((node if node in tensor else read[node][0]).stack_trace)
            lines.update({} if line is None or line in size_lines else {line: None})
        graph.erase_node(node)
    eliminate_dead_code(program)
    program.graph_module.recompile()


def eliminate_dead_code(program: ExportedProgram) -> None:
    """Removes unused nodes, except for those that write to tensors."""
    program.graph.eliminate_dead_code(
        lambda node: node.is_impure() or bool(effects.mutated_inputs(program.graph_module, node))
    )


def _is_check(assertion: fx.Node) -> bool:
    """Returns True for an assertion of the model about a number, False for one that torch.export adds."""
    targets = {source.target for source in _ancestors([assertion])}
    return torch.ops.aten.item.default in targets and torch.sym_ite not in targets


_TENSOR_ASSERTIONS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)


def _ancestors(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Returns nodes, and all nodes that they depend on, nearest first."""
    visited, queue = set(nodes), list(nodes)
    for node in queue:
        new = [source for source in node.all_input_nodes if source not in visited]
        visited.update(new)
        queue += new
    return queue


# The file of torch.export that calls the model.
_TRACE_FILE = _trace.__file__

# Context managers in models that do not suppress exceptions.
_TRANSPARENT_MANAGERS = {
    *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "maybe_autocast"),
    *("device", "stream", "nullcontext", "record_function", "sdpa_kernel", "catch_warnings", "fork_rng"),
}

_Span = tuple[int | None, int | None, int | None, int | None]


def _passing_answer(frame: FrameType) -> bool | None:
    """Returns the passing value of the check in a frame's line, if it is a check."""
    if _is_special_method(frame.f_code.co_name) or not is_user_code(frame.f_code.co_filename):
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
        elif isinstance(statement, ast.Expr) and _is_torch_assert(statement.value):
            checks.conditions.update(_answers(statement, statement.value.args[0], passing=True))
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


def _is_torch_assert(call: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(call, ast.Call) and bool(call.args) and ast.unparse(call.func) == "torch._assert"


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
