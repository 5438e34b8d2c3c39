"""Errors of the ONNX export that name the operator, the user's line, and what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import fx

from optexport._utils.user_lines import find_node_line
from optexport.errors import ExportError, OptexportError, root_cause

Function = Callable[..., Any]

_LEAVE_OUT = 'or leave "onnx" out of export.formats.'
_OUTSIDE = f"Compute it outside the model and pass the result as an input, {_LEAVE_OUT}"
# What to write instead, by the name of the operator.
_HINTS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("linalg_svd", "linalg_svdvals", "_linalg_svd", "linalg_eig", "linalg_eigh", "linalg_eigvalsh"),
            *("_linalg_eigh", "linalg_qr", "linalg_lstsq", "linalg_matrix_exp", "gcd"),
        ),
        _OUTSIDE,
    ),
    "linalg_pinv": "For a matrix of full rank, write torch.linalg.inv(x.mT @ x) @ x.mT.",
    "mode": f"Count with torch.bincount and take its argmax, {_LEAVE_OUT}",
    "unique_consecutive": f"Cast to int64 first, {_LEAVE_OUT}",
}


class UnsupportedError(Exception):
    """An operator that ONNX cannot express with these arguments.

    Attributes:
        hint: What to write instead, as an imperative sentence.
        node: The call of the operator in the graph, if known.
        operator: Name of the operator; the node may call its replacement.
    """

    def __init__(self, message: str, hint: str = _OUTSIDE) -> None:
        super().__init__(message)
        self.hint = hint
        self.node: fx.Node | None = None
        self.operator = ""


def naming_node(function: Function, node: fx.Node) -> Function:
    """Wraps a replacement so that its errors know the node that it replaces."""
    operator = node.target

    @functools.wraps(function)
    def called(*args: Any, **kw: Any) -> Any:
        try:
            return function(*args, **kw)
        except UnsupportedError as error:
            error.node, error.operator = node, _name(operator)
            raise

    return called


def as_refusal(error: Exception, try_opset: Callable[[], int | None]) -> OptexportError:
    """Returns the error to raise for a failed conversion: the given one if it is an error of this package.

    Args:
        try_opset: Returns another opset with which the conversion succeeds, or None.
    """
    for cause in _causes(error):
        if isinstance(cause, UnsupportedError) and cause.node is not None:
            return _build(str(cause), cause.node, cause.operator, cause.hint)
    if isinstance(error, OptexportError):
        return error
    node, reason = _find_node(error), root_cause(error)
    opset = try_opset()
    if node is None:
        message = f"torch.onnx could not convert the graph: {reason}"
        hint = 'Leave "onnx" out of export.formats.' if opset is None else _set_opset(opset)
        return ExportError(message, location="export.formats: onnx", hint=hint)
    operator = _name(node.meta.get("original_aten") or node.target)
    if "No ONNX function found" in reason:
        reason = f"ONNX has no operator for it{' for complex numbers' if 'complex-valued' in reason else ''}"
    else:
        reason = f"torch.onnx could not convert it: {reason}"
    if opset is not None:
        return _build(reason, node, operator, _set_opset(opset))
    name = operator.split(".")[1] if "." in operator else operator
    return _build(reason, node, operator, _HINTS.get(name, f"Write this line with other operators, {_LEAVE_OUT}"))


def _set_opset(opset: int) -> str:
    return f"Set export.opset to {opset}."


def _build(message: str, node: fx.Node, operator: str, hint: str) -> ExportError:
    line = find_node_line(node.stack_trace)
    return ExportError(
        f"{operator}{f', at {line}' if line else ''}: {message}", location="export.formats: onnx", hint=hint
    )


def _name(target: Any) -> str:
    return str(target).removeprefix("torch.ops.").removesuffix(".default")


def _find_node(error: BaseException) -> fx.Node | None:
    """Returns the node that ``torch.onnx`` was translating; its errors contain only the node's text."""
    for cause in _causes(error):
        for frame in _frames(cause.__traceback__):
            if isinstance(node := frame.get("node"), fx.Node):
                return node
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _frames(traceback: TracebackType | None) -> Iterator[Mapping[str, Any]]:
    while traceback is not None:
        yield traceback.tb_frame.f_locals
        traceback = traceback.tb_next
