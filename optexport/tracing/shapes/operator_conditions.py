"""Records conditions on sizes that only operators ask for in a trace, to choose strides or a way to compute.

The fake implementation of ``reshape`` asks whether sizes divide each other, and of a convolution whether its input is
contiguous. Such conditions become assertions of the program, although its operators work at all sizes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import _ops
from torch.export import ExportedProgram
from torch.fx.experimental import recording, sym_node, symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, canonicalize_bool_expr

_META_KEY = "optexport_operator_conditions"
# Beginning of the message of an assertion that torch.export adds for a condition.
_MESSAGE = "Runtime assertion failed for expression "
_TORCH_FOLDER = Path(torch.__file__).parent
_OPERATORS = tuple(
    str(_TORCH_FOLDER / name) for name in ("_decomp", "_meta_registrations.py", "_prims", "_refs", "_subclasses")
)
# Files whose frames lie between a line and the evaluation of its condition: other patches too.
_FILES_BETWEEN = (
    *(str(module.__file__) for module in (contextlib, functools, recording, sym_node, symbolic_shapes, torch)),
    str(Path(__file__).parents[1]),
)


@contextlib.contextmanager
def recording_operator_conditions() -> Iterator[set[str]]:
    """Records the messages of the assertions that operators cause, and the model does not, within the block."""
    by_operator, by_model = set[str](), set[str]()
    defer = ShapeEnv.guard_or_defer_runtime_assert

    def recorded(environment: ShapeEnv, expression: Any, *args: Any, **options: Any) -> bool:
        name = _find_file(sys._getframe(1))
        if name != _ops.__file__:  # evaluates the assertions again, to add them to the program
            messages = by_operator if name.startswith(_OPERATORS) else by_model
            messages.add(f"{_MESSAGE}{canonicalize_bool_expr(expression)}")
        return defer(environment, expression, *args, **options)

    recorded_messages = set[str]()
    with mock.patch.object(ShapeEnv, "guard_or_defer_runtime_assert", recorded):
        yield recorded_messages
    recorded_messages |= by_operator - by_model


def _find_file(frame: FrameType | None) -> str:
    """Returns the file that asks for a condition."""
    while frame is not None and frame.f_code.co_filename.startswith(_FILES_BETWEEN):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def store_operator_conditions(program: ExportedProgram, messages: Collection[str]) -> None:
    """Stores recorded messages in a program's metadata."""
    program.graph_module.meta[_META_KEY] = messages


def find_operator_conditions(program: ExportedProgram) -> set[Any]:
    """Returns the asserted conditions in torch's symbols that only operators asked for."""
    messages = program.graph_module.meta.get(_META_KEY, ())
    assertions = program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    # torch.export rewrites the condition when it adds the assertion, so only the message identifies it.
    asserted = [node.args[0].meta["val"] for node in assertions if node.args[1].partition(" on node ")[0] in messages]
    return {value.node.expr for value in asserted if isinstance(value, torch.SymBool)}
