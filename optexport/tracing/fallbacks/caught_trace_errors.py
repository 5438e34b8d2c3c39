"""Errors that only a trace raises, and that a model swallows: it goes on as it would not with values."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from optexport.errors import TraceError
from optexport.tracing.model_lines import is_of_model

_KINDS: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


# What asks a tensor for its values, of which a trace has none; the errors are of kinds that others raise too.
_ASKING = ("numpy", "data_ptr")


@contextlib.contextmanager
def none_swallowed() -> Iterator[None]:
    """Refuses, at its end, a model that caught such an error itself and went on; torch may catch its own.

    Raises:
        TraceError: It did.
    """
    raised: list[Exception] = []
    made = {kind: kind.__init__ for kind in _KINDS}
    for kind in _KINDS:
        kind.__init__ = _noting(made[kind], raised)  # type: ignore[method-assign]
    for name in _ASKING:
        setattr(torch.Tensor, name, _noting_what_is_raised(getattr(torch.Tensor, name), raised))
    try:
        yield
    finally:
        for name in _ASKING:
            delattr(torch.Tensor, name)  # behind which is that of the class that it is of
        for kind in _KINDS:
            kind.__init__ = made[kind]  # type: ignore[method-assign]
    for error in raised:
        # A traceback grows as its error goes outwards, so that it begins where the error was caught.
        caught = error.__traceback__
        if caught is not None and _is_of_model(name := caught.tb_frame.f_code.co_filename):
            line = linecache.getline(name, caught.tb_lineno).strip()
            raise TraceError(
                "the model asks for a value, which a trace does not know, and goes on where that raises, at "
                f"{Path(name).name}:{caught.tb_lineno}: {line}",
                location="trace",
                hint="Compute both ways and choose by torch.where, or let the error end the call.",
            )


def _is_of_model(filename: str) -> bool:
    """Whether code is a model's; that of no file is, but what torch writes as it traces."""
    return is_of_model(filename) or filename in ("<string>", "<stdin>")


def _noting(made: Callable[..., None], raised: list[Exception]) -> Callable[..., None]:
    def init(error: Exception, *args: Any, **kwargs: Any) -> None:
        made(error, *args, **kwargs)
        raised.append(error)

    return init


def _noting_what_is_raised(method: Callable[..., Any], raised: list[Exception]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raised.append(error)
            raise

    return call
