"""Traces a model again after a failure, with fewer dynamic axes, known values or other outputs.

``tests/zoo/rescues.py`` counts the models that need this. VideoLlama3's vision model is one
(tests/tracing/fallbacks/test_attempts.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from optexport._utils.user_lines import find_line
from optexport.errors import TraceError, UntraceableError, ValuesAskedError
from optexport.signature.arguments import fix_inputs
from optexport.signature.outputs import as_containers, has_own_classes
from optexport.signature.signature import Batch, as_argument
from optexport.tracing.fallbacks.known_values import KnownValues
from optexport.tracing.fallbacks.value_branches import exploring_branches
from optexport.tracing.model_run import run
from optexport.tracing.shapes.expression_limit import LongSizeError

T = TypeVar("T")
# Traces a model with an example. The third argument maps inputs to the axes that may be dynamic, or is None for all
# axes. The last is the reason to report for axes that are fixed.
Trace = Callable[[nn.Module, Batch, Mapping[str, Sequence[int]] | None, str], T]

# Inputs that differ in every call, or that mark parts of a text, are never made constants.
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
# An input with more elements does not hold sizes of images or lengths.
_MAX_CONSTANT_ELEMENTS = 256
_MAX_SHOWN_CHARACTERS = 80


def retry_trace(
    model: nn.Module, example: Batch, error: UntraceableError, trace: Trace[T], *, is_declared: bool
) -> tuple[T, dict[str, torch.Tensor], tuple[str, ...]]:
    """Traces a model with only the batch dynamic, with known values, or with both.

    Args:
        error: The error of the first trace.
        is_declared: Whether dynamic axes were declared; all of these stay dynamic then, and no input becomes a
            constant.

    Returns:
        The trace, the inputs that became constants, and a note for each of these.

    Raises:
        UntraceableError: The given error, if every attempt fails.
        TraceError: The declared axes could be dynamic if some inputs were constants.
    """
    reason = f"; if that were dynamic, {error.message}"
    if not is_declared:
        with contextlib.suppress(UntraceableError):
            return trace(model, example, dict.fromkeys(example, (0,)), reason), {}, ()
    all_axes = () if isinstance(error.__cause__, LongSizeError) else (None,)
    for axes in all_axes if is_declared else (*all_axes, (0,), ()):
        with contextlib.suppress(UntraceableError):
            return _trace_with_values(model, example, axes, trace, reason, is_declared=is_declared)
    raise error from error.__cause__


def _trace_with_values(
    model: nn.Module, example: Batch, axes: tuple[int, ...] | None, trace: Trace[T], reason: str, *, is_declared: bool
) -> tuple[T, dict[str, torch.Tensor], tuple[str, ...]]:
    """Traces a model with known values; inputs whose values it reads become constants."""
    constants: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    changing: frozenset[str] = frozenset()
    while True:
        inputs = {name: tensor for name, tensor in example.items() if name not in constants}
        fixed_model = fix_inputs(model, list(example), constants)
        free = None if axes is None else dict.fromkeys(inputs, axes)
        values = KnownValues({as_argument(n): v for n, v in inputs.items() if _may_be_constant(n, v)}, changing)
        try:
            with values.track(fixed_model):
                result = trace(fixed_model, inputs, free, "" if free is None else reason)
            if values.changing == changing:
                return result, constants, tuple(notes)
            changing = values.changing  # the values read from these buffers were valid for one call only
        except ValuesAskedError as error:
            names = [n for n in inputs if as_argument(n) in error.inputs and _may_be_constant(n, inputs[n])]
            line = find_line(error)
            if not names or len(names) == len(inputs):
                raise
            if is_declared:
                raise _value_error(names, example, line) from error
            for name in names:
                constants[name] = example[name]
                notes.append(f"{_format(name, example)}; the model reads its values{f' at {line}' if line else ''}")


def trace_branches(model: nn.Module, trace: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    """Traces all ways of a model through its branches on values of the inputs.

    Values of buffers are known: they decide a branch once and for all, unless the model changes them.

    Returns:
        The trace, and the lines of the branches of which one way raises.
    """
    changing: frozenset[str] = frozenset()
    while True:
        values = KnownValues({}, changing)
        with exploring_branches() as checks, values.track(model):
            result = trace()
        if values.changing == changing:
            return result, tuple(checks)
        changing = values.changing


def _may_be_constant(name: str, tensor: torch.Tensor) -> bool:
    is_integer = tensor.dtype in (torch.int64, torch.int32)
    return is_integer and tensor.numel() <= _MAX_CONSTANT_ELEMENTS and not name.endswith(_TEXT_INPUTS)


def _value_error(names: Sequence[str], example: Batch, line: str | None) -> TraceError:
    return TraceError(
        f"the model reads the values of these inputs{f' at {line}' if line else ''}, which a graph does not know",
        location=f"inputs: {' and '.join(names)}",
        hint="If they are the same in every call, make them constants: [inputs.constants] "
        + ", ".join(_format(name, example) for name in names),
    )


def _format(name: str, example: Batch) -> str:
    values = str(example[name].tolist())
    is_long = len(values) > _MAX_SHOWN_CHARACTERS
    return f"{name} = {f'{values[:_MAX_SHOWN_CHARACTERS]} ...' if is_long else values}"


def returns_own_classes(model: nn.Module, example: Mapping[str, torch.Tensor]) -> bool:
    """Returns True if a model returns objects that ``torch.export`` does not know; False if the model fails."""
    try:
        return has_own_classes(run(model, example))
    except Exception:  # the model's code may raise anything; the caller reports its error
        return False


@contextlib.contextmanager
def returning_containers(model: nn.Module) -> Iterator[None]:
    """Makes a model return dicts in place of objects that ``torch.export`` does not know."""
    hook = model.register_forward_hook(lambda _, __, outputs: as_containers(outputs))
    try:
        yield
    finally:
        hook.remove()
