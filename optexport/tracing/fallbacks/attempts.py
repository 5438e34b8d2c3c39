"""What else is tried where a model cannot be traced as asked for: fewer sizes dynamic, and values that are known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from optexport.errors import TraceError, UntraceableError, ValuesAskedError
from optexport.signature.arguments import holding
from optexport.signature.signature import Batch, as_argument
from optexport.tracing.fallbacks.constants import KnownValues
from optexport.tracing.model_lines import line_of_model
from optexport.tracing.shapes.size_expressions import LongSizeError

T = TypeVar("T")
# Traces a model with an example of which some axes may be dynamic, or all; what is said of those that may not is last.
Trace = Callable[[nn.Module, Batch, Mapping[str, Sequence[int]] | None, str], T]

# Inputs that are another text in every call, or say which parts of one count.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
# Longer inputs are no sizes of images, or lengths.
_MOST_HELD = 256
# Of a value that is held so much is told.
_MOST_SHOWN = 80


def trace_otherwise(
    model: nn.Module, example: Batch, error: UntraceableError, trace: Trace[T], *, is_declared: bool
) -> tuple[T, dict[str, torch.Tensor], tuple[str, ...]]:
    """Traces a model that could not be traced: with the batch alone dynamic, with known values, or with both.

    Args:
        error: Why it could not.
        is_declared: Whether somebody said which axes are to be dynamic; then all of them are, and no input is held.

    Returns:
        The trace, the inputs that it holds to their values in the example, and what is to be told of these.

    Raises:
        UntraceableError: The error, where nothing helps.
        TraceError: Declared sizes could be had if inputs were held to their values.
    """
    why = f"; if that were dynamic, {error.message}"
    if not is_declared:
        with contextlib.suppress(UntraceableError):
            return trace(model, example, dict.fromkeys(example, (0,)), why), {}, ()
    everything = () if isinstance(error.__cause__, LongSizeError) else (None,)
    for axes in everything if is_declared else (*everything, (0,), ()):
        with contextlib.suppress(UntraceableError):
            return _trace_with_values(model, example, axes, trace, why, is_declared=is_declared)
    raise error from error.__cause__


def _trace_with_values(
    model: nn.Module, example: Batch, axes: tuple[int, ...] | None, trace: Trace[T], why: str, *, is_declared: bool
) -> tuple[T, dict[str, torch.Tensor], tuple[str, ...]]:
    """Traces a model that is told values which hang on no input, holding the inputs for whose values it asks too."""
    held: dict[str, torch.Tensor] = {}
    told: list[str] = []
    changing: frozenset[str] = frozenset()
    while True:
        rest = {name: tensor for name, tensor in example.items() if name not in held}
        called = holding(model, list(example), held)
        free = None if axes is None else dict.fromkeys(rest, axes)
        known = KnownValues({as_argument(name): v for name, v in rest.items() if _may_be_held(name, v)}, changing)
        try:
            with known.of(called):
                found = trace(called, rest, free, "" if free is None else why)
            if known.changing == changing:
                return found, held, tuple(told)
            changing = known.changing  # what was read of these before they were written to holds for one call alone
        except ValuesAskedError as error:
            asked = [name for name in rest if as_argument(name) in error.inputs and _may_be_held(name, rest[name])]
            line = line_of_model(error)
            if not asked or len(asked) == len(rest):
                raise
            if is_declared:
                raise _asked_error(asked, example, line) from error
            for name in asked:
                held[name] = example[name]
                told.append(f"{_shown(name, example)}; the model asks for its values{f' at {line}' if line else ''}")


def _may_be_held(name: str, tensor: torch.Tensor) -> bool:
    is_whole = tensor.dtype in (torch.int64, torch.int32)
    return is_whole and tensor.numel() <= _MOST_HELD and not name.endswith(_OF_TEXT)


def _asked_error(asked: Sequence[str], example: Batch, line: str | None) -> TraceError:
    return TraceError(
        f"the model asks for its values{f' at {line}' if line else ''}, which a graph does not know",
        location=f"inputs: {' and '.join(asked)}",
        hint="If they are the same in every call, make them a part of the file: [inputs.constants] "
        + ", ".join(_shown(name, example) for name in asked),
    )


def _shown(name: str, example: Batch) -> str:
    values = str(example[name].tolist())
    return f"{name} = {values if len(values) <= _MOST_SHOWN else f'{values[:_MOST_SHOWN]} ...'}"
