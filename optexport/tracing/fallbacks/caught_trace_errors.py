"""Refuses models that catch an error that only a trace raises.

Such a model continues on a branch that it would not take with real values.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from optexport._utils.user_lines import is_user_code
from optexport.errors import TraceError

TRACE_ERRORS: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


# Methods that read a tensor's values, which a trace does not know. They raise general errors such as RuntimeError.
_READING_METHODS = ("numpy", "data_ptr")


@contextlib.contextmanager
def refuse_caught_errors() -> Iterator[None]:
    """Checks at the end of the block that the model caught no such error. torch itself may catch them.

    Raises:
        TraceError: The model caught one.
    """
    raised: list[Exception] = []
    original_inits = {kind: kind.__init__ for kind in TRACE_ERRORS}
    for kind in TRACE_ERRORS:
        kind.__init__ = _recording_init(original_inits[kind], raised)  # type: ignore[method-assign]
    for name in _READING_METHODS:
        setattr(torch.Tensor, name, _recording_method(getattr(torch.Tensor, name), raised))
    try:
        yield
    finally:
        for name in _READING_METHODS:
            delattr(torch.Tensor, name)  # the original is inherited from torch._C.TensorBase
        for kind in TRACE_ERRORS:
            kind.__init__ = original_inits[kind]  # type: ignore[method-assign]
    for error in raised:
        # The outermost frame of a traceback is the one in which the error was caught.
        traceback = error.__traceback__
        if traceback is not None and _is_user_code(name := traceback.tb_frame.f_code.co_filename):
            line = linecache.getline(name, traceback.tb_lineno).strip()
            raise TraceError(
                "the model reads a value that a trace does not know, and catches the error at "
                f"{Path(name).name}:{traceback.tb_lineno}: {line}",
                location="trace",
                hint="Compute both branches and choose with torch.where, or do not catch the error.",
            )


def _is_user_code(filename: str) -> bool:
    """Returns True for a model's file, and for code typed or piped into Python."""
    return is_user_code(filename) or filename in ("<string>", "<stdin>")


def _recording_init(original_init: Callable[..., None], raised: list[Exception]) -> Callable[..., None]:
    def init(error: Exception, *args: Any, **kwargs: Any) -> None:
        original_init(error, *args, **kwargs)
        raised.append(error)

    return init


def _recording_method(method: Callable[..., Any], raised: list[Exception]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raised.append(error)
            raise

    return call
