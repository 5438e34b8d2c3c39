"""Errors that only a trace raises, and that a model swallows: it goes on as it would not with values."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    try:
        yield
    finally:
        for kind in _KINDS:
            kind.__init__ = made[kind]  # type: ignore[method-assign]
    for error in raised:
        # A traceback grows as its error goes outwards, so that it begins where the error was caught.
        caught = error.__traceback__
        if caught is not None and is_of_model(name := caught.tb_frame.f_code.co_filename):
            line = linecache.getline(name, caught.tb_lineno).strip()
            raise TraceError(
                "the model asks for a value, which a trace does not know, and goes on where that raises, at "
                f"{Path(name).name}:{caught.tb_lineno}: {line}",
                place="trace",
                mend="Compute both ways and choose by torch.where, or let the error end the call.",
            )


def _noting(made: Callable[..., None], raised: list[Exception]) -> Callable[..., None]:
    def init(error: Exception, *args: Any, **kwargs: Any) -> None:
        made(error, *args, **kwargs)
        raised.append(error)

    return init
