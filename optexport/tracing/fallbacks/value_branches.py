"""Traces every way that a model takes through branches on tensor values.

``if torch.isnan(x).any(): x = torch.nan_to_num(x)`` depends on values, which a trace does not know. Here a single trace
calls the model once for each way. A way that raises is a check of values, and is left out. `SELECT` chooses between the
results of the other ways; `optexport.tracing.fallbacks.branch_merging` moves the choice to where the ways meet.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental import sym_node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optexport._utils.user_lines import describe_frame, find_user_frame, is_user_code
from optexport.errors import OptexportError, TraceError, UntraceableError
from optexport.signature.outputs import has_own_classes
from optexport.tracing.fallbacks.caught_trace_errors import TRACE_ERRORS

# Each branch may double the number of ways.
_MAX_WAYS = 16
# How often one line may branch on one way. More are a loop that ends at some value.
_MAX_TIMES = 8
# Folders and files of torch whose own decisions on values are not branches of the model.
_INTERNALS = tuple(
    str(Path(torch.__file__).with_name(name))
    for name in ("_decomp", "_higher_order_ops", "_meta_registrations.py", "_prims", "_refs", "_subclasses")
)
_PACKAGE = str(Path(__file__).parents[1])
_UNKNOWN = (GuardOnDataDependentSymNode, DataDependentOutputException)
_MANY_HINT = "Choose with torch.where(condition, a, b) instead, or repeat a loop a fixed number of times."
_HINT = "Compute both ways and choose with torch.where(condition, a, b), with results of the same shape and dtype."

_LIBRARY = torch.library.Library("optexport", "FRAGMENT")
_LIBRARY.define("select_way(Tensor condition, Tensor a, Tensor b, str line) -> Tensor")
_LIBRARY.impl("select_way", lambda condition, a, b, _: torch.where(condition, a, b), "CompositeExplicitAutograd")
# No comparison of sizes: these may be unknown until the ways are merged.
torch.library.register_fake("optexport::select_way", lambda _condition, a, _b, _: torch.empty_like(a), lib=_LIBRARY)
SELECT = torch.ops.optexport.select_way.default
_LIBRARY.define("copy_input(Tensor input) -> Tensor")
_LIBRARY.impl("copy_input", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("optexport::copy_input", torch.clone, lib=_LIBRARY)
COPY = torch.ops.optexport.copy_input.default


@dataclass
class _Way:
    """One way through the model.

    Attributes:
        answers: The answer at each branch; False at those that are reached for the first time.
        conditions: The condition of each branch on the way, as a traced tensor.
        lines: The line of each branch.
        tensors: The tensors that were asked for their truth, each with its version and the answer.
    """

    answers: list[bool]
    conditions: list[torch.Tensor] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, int, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class _Raised:
    """The end of a way that raises."""

    error: Exception


class BranchExplorer(TorchFunctionMode):
    """Calls a model once for each way through its branches on values.

    Args:
        checks: Gets the lines of the branches of which one way raises, as keys.
    """

    def __init__(self, model: nn.Module, checks: dict[str, None]) -> None:
        super().__init__()
        self._model = model
        self._checks = checks
        self._way = _Way([])
        self._ways = 0

    def explore(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the outputs of a call, chosen by the values of the inputs.

        Raises:
            UntraceableError: There are too many ways, or the outputs of two ways differ in more than values.
            Exception: Any error of the model, if all ways raise.
        """
        self._ways = 0
        with self._answering():
            result = self._explore(lambda: call(*_copy(args), **_copy(kwargs)), [])
        if isinstance(result, _Raised):
            raise result.error
        return result

    def _explore(self, call: Callable[[], Any], answers: Sequence[bool]) -> Any:
        self._ways += 1
        way = self._way = _Way([*answers])
        buffers = dict(self._model.named_buffers())
        result = self._run(call)
        if way.answers:
            replaced = [name for name, buffer in self._model.named_buffers() if buffers.get(name) is not buffer]
            if replaced:
                raise state_error(way.lines[-1], replaced)
        for index in reversed(range(len(answers), len(way.answers))):
            if self._ways >= _MAX_WAYS:
                raise _too_many_ways(way.lines[index])
            other = self._explore(call, [*way.answers[:index], not way.answers[index]])
            result = self._choose(way.conditions[index], other, result, way.lines[index])
        return result

    def _run(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TRACE_ERRORS:
            raise
        except OptexportError:
            raise
        except Exception as error:  # model code may raise anything
            if self._way.answers and _is_raised_by_model(error):
                return _Raised(error)
            raise

    def _choose(self, condition: torch.Tensor, if_true: Any, if_false: Any, line: str) -> Any:
        if isinstance(if_true, _Raised) or isinstance(if_false, _Raised):
            self._checks[line] = None
            return if_false if isinstance(if_true, _Raised) else if_true
        true_leaves, true_spec = pytree.tree_flatten(if_true)
        false_leaves, false_spec = pytree.tree_flatten(_sort_like(if_true, if_false))
        if true_spec != false_spec:
            raise _different_results(line, "other outputs")
        leaves = [_choose_leaf(condition, *pair, line) for pair in zip(true_leaves, false_leaves, strict=True)]
        return pytree.tree_unflatten(leaves, true_spec)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise UntraceableError("torch.export ignores assignments to tensor.data", location="trace")
        try:
            return func(*args, **kwargs)
        except _UNKNOWN:
            line = _find_branch_line(sys._getframe(1)) if func in _CONDITIONS else None
            asked = args[0] if func in _TRUTHS and args else None
            for tensor, version, answer in self._way.tensors:
                if tensor is asked and tensor._version == version:
                    return answer
            condition = _CONDITIONS[func](*args, **kwargs) if line is not None else None
            if condition is None or line is None:
                raise
        answer = self._answer(condition, line)
        if isinstance(asked, torch.Tensor):
            self._way.tensors.append((asked, asked._version, answer))
        return answer

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Answers the model's questions for values in the block, those of numbers and those of tensors."""
        guard_bool = SymNode.guard_bool

        def answering_guard_bool(node: SymNode, *args: Any) -> bool:
            try:
                return guard_bool(node, *args)
            except GuardOnDataDependentSymNode:
                frame = sys._getframe(1)
                line = _find_branch_line(frame) if _is_number(frame) else None
                if line is None:
                    raise
            condition = torch.ops.aten.scalar_tensor.default(torch.SymBool(node), dtype=torch.bool)
            return self._answer(condition, line)

        with mock.patch.object(SymNode, "guard_bool", answering_guard_bool), self:
            yield

    def _answer(self, condition: torch.Tensor, line: str) -> bool:
        way = self._way
        index = len(way.conditions)
        if index == len(way.answers):
            if way.lines.count(line) >= _MAX_TIMES:
                raise UntraceableError(
                    f"the line {line} branches on values more than {_MAX_TIMES} times in one call",
                    location="trace",
                    hint=_MANY_HINT,
                )
            way.answers.append(False)
        way.conditions.append(condition)
        way.lines.append(line)
        return way.answers[index]


# The lines of checks that were found, within `exploring_branches`.
_CHECKS: ContextVar[dict[str, None] | None] = ContextVar("checks", default=None)


@contextlib.contextmanager
def exploring_branches(*, enabled: bool = True) -> Iterator[dict[str, None]]:
    """Makes every trace within the block take all ways through branches on values, if enabled.

    Yields the lines of the branches of which one way raises, as keys.
    """
    checks: dict[str, None] = {}
    token = _CHECKS.set(checks if enabled else None)
    try:
        yield checks
    finally:
        _CHECKS.reset(token)


@contextlib.contextmanager
def calling_all_ways(model: nn.Module) -> Iterator[None]:
    """Within `exploring_branches`, replaces a model's forward by one that takes all ways."""
    checks = _CHECKS.get()
    if checks is None:
        yield
        return
    forward, own_forward = model.forward, vars(model).get("forward")
    explorer = BranchExplorer(model, checks)

    @functools.wraps(forward)
    def explore(*args: Any, **kwargs: Any) -> Any:
        return explorer.explore(forward, args, kwargs)

    explore.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # without self
    model.forward = explore
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if own_forward is not None:
            model.forward = own_forward


def is_branch(error: Exception) -> bool:
    """Returns True for the error of a trace that stopped at a branch on values."""
    return isinstance(error.__cause__, _UNKNOWN)


def state_error(line: str, names: Sequence[str]) -> TraceError:
    """Returns the error for a model that branches on values and writes to its state, which all ways share."""
    return TraceError(
        f"the model branches on values at {line}, and writes to its state ({', '.join(names)})",
        location="trace",
        hint="Choose with torch.where(condition, a, b) instead of the branch.",
    )


def different_shapes_error(line: str, shapes: Sequence[Sequence[Any]]) -> UntraceableError:
    """Returns the error for two ways whose results have other shapes."""
    return _different_results(line, f"results of the shapes {' and '.join(str(list(shape)) for shape in shapes)}")


def _copy(arguments: Any) -> Any:
    """Copies tensors, because each way may write to the inputs."""
    return pytree.tree_map_only(torch.Tensor, COPY, arguments)


# These have the names of torch's parameters.


def _to_condition(input: torch.Tensor) -> torch.Tensor | None:  # noqa: A002
    return input.reshape(()) != 0 if input.numel() == 1 else None


def _to_equality(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:  # noqa: A002
    return (input == other).all() if input.shape == other.shape else None


def _to_closeness(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(*args, **kwargs).all()


_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
# Functions that return a bool, each with the same condition as a tensor.
_CONDITIONS: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    **dict.fromkeys(_TRUTHS, _to_condition),
    **dict.fromkeys((torch.equal, torch.Tensor.equal), _to_equality),
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose), _to_closeness),
}


def _is_number(frame: FrameType | None) -> bool:
    """Returns True if Python asks for the truth of a symbolic number, not of a tensor."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == sym_node.__file__ and frame.f_code.co_name == "bool_"


def _find_branch_line(frame: FrameType | None) -> str | None:
    """Returns the model's line that asks for a value; None if torch decides something on its own."""
    frame = find_user_frame(
        frame, stop=lambda name: name.startswith(_INTERNALS) or name.endswith(f"{os.sep}symbolic_shapes.py")
    )
    return None if frame is None else describe_frame(frame)


def _is_raised_by_model(error: Exception) -> bool:
    """Returns True for an error of ``raise``, ``assert`` or ``torch._assert`` in the model's code.

    Other errors may happen in a trace only, such as that of ``f"{v:.1f}"`` with a symbolic number.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    if code.co_filename == torch.__file__:
        return code.co_name == torch._assert.__name__
    return is_user_code(code.co_filename) and dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"


def _sort_like(template: Any, outputs: Any) -> Any:
    """Returns outputs with the keys of dicts in another's order."""
    if type(template) is not type(outputs):
        return outputs
    if type(outputs) in (dict, OrderedDict) and template.keys() == outputs.keys():
        return type(outputs)((key, _sort_like(value, outputs[key])) for key, value in template.items())
    if type(outputs) in (list, tuple) and len(template) == len(outputs):
        return type(outputs)(map(_sort_like, template, outputs))
    return outputs


def _choose_leaf(condition: torch.Tensor, if_true: Any, if_false: Any, line: str) -> Any:
    if isinstance(if_true, torch.Tensor) and isinstance(if_false, torch.Tensor):
        if if_true.dim() != if_false.dim():
            raise different_shapes_error(line, (if_true.shape, if_false.shape))
        if if_true.dtype != if_false.dtype:
            raise _different_results(line, f"results of the dtypes {if_true.dtype} and {if_false.dtype}")
        return SELECT(condition, if_true, if_false, line)
    if has_own_classes((if_true, if_false)):
        raise TypeError(f"a class that torch does not know (found {type(if_true).__name__})")
    if isinstance(if_true, torch.Tensor) or isinstance(if_false, torch.Tensor) or if_true != if_false:
        raise _different_results(line, f"other results ({type(if_true).__name__} and {type(if_false).__name__})")
    return if_true


def _different_results(line: str, description: str) -> UntraceableError:
    return UntraceableError(f"the two ways of the branch at {line} give {description}", location="trace", hint=_HINT)


def _too_many_ways(line: str) -> UntraceableError:
    return UntraceableError(
        f"the branches on values, such as the one at {line}, have more than {_MAX_WAYS} ways",
        location="trace",
        hint=_MANY_HINT,
    )
