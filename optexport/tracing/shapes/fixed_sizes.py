"""Finds the line of a model that fixes a dynamic size, such as a Python loop over an axis."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from optexport._utils.user_lines import find_innermost_line

_META_KEY = "optexport_fixing_lines"


@contextlib.contextmanager
def recording_fixed_sizes() -> Iterator[dict[int, str]]:
    """Records the first line of the model that fixes a dynamic size to each number, within the block."""
    lines: dict[int, str] = {}
    outer_frames = sum(1 for _ in traceback.walk_stack(None))
    set_replacement = ShapeEnv._set_replacement

    def recorded(environment: ShapeEnv, symbol: Any, value: Any, reason: str) -> None:
        if value.is_Integer and (line := find_innermost_line(traceback.extract_stack()[outer_frames:])):
            lines.setdefault(int(value), line)
        set_replacement(environment, symbol, value, reason)

    with mock.patch.object(ShapeEnv, "_set_replacement", recorded):
        yield lines


def store_fixing_lines(program: ExportedProgram, lines: Mapping[int, str]) -> None:
    """Stores recorded lines in a program's metadata."""
    program.graph_module.meta[_META_KEY] = lines


def find_fixing_line(program: ExportedProgram, size: int) -> str | None:
    """Returns the line that fixes a dynamic size to a number, if one was recorded."""
    lines: Mapping[int, str] = program.graph_module.meta.get(_META_KEY, {})
    return lines.get(size)


def is_fixed_by_len(program: ExportedProgram) -> bool:
    """Returns True if a line with ``len(...)`` fixed a dynamic size."""
    lines: Mapping[int, str] = program.graph_module.meta.get(_META_KEY, {})
    return any(re.search(r"\blen\(", line) for line in lines.values())


def describe_fixing_line(line: str | None) -> str:
    """Returns the end of an error message that names the line."""
    return f", because of {line}" if line else ""


def choose_hint(line: str | None, otherwise: str) -> str:
    """Returns the hint to replace the conversion or loop in the line that fixes a size, or another hint."""
    if line is not None and re.search(r"\bint\(", line):
        return (
            "Use the size itself instead of int(size), and einops instead of einx, or remove the dimension from"
            " inputs.dynamic to fix it."
        )
    if line is not None and re.search(r"\bmath\.", line):
        return (
            "Compute the number with tensors, such as torch.full((), size, dtype=torch.float64).log() for"
            " math.log(size), and torch.clamp for max, or remove the dimension from inputs.dynamic to fix it."
        )
    if line is None or not re.search(r"\bfor\b|\bunbind\b|\bsplit\b|\bchunk\b", line):
        return otherwise
    return (
        "Replace the loop by operators for the whole axis, such as nn.LSTM for nn.LSTMCell, or remove the dimension"
        " from inputs.dynamic to fix it."
    )
