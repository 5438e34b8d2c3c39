"""Finds the line of a model, a rule or another caller of torch that an error came from."""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import os
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import torch

from optexport.errors import describe_error

# Found without an import: a bundle is verified without transformers.
_transformers = importlib.util.find_spec("transformers")
_EXPORTERS = [Path(_transformers.origin).parent / "exporters"] if _transformers and _transformers.origin else []
_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], *_EXPORTERS)
)
_STANDARD_LIBRARY = tuple(
    str(Path(contextlib.__file__).with_name(f"{name}.py")) for name in ("contextlib", "functools")
)


def is_user_code(filename: str) -> bool:
    """Returns False for files of torch, the exporters and optexport, and for generated code."""
    return not filename.startswith((*_LIBRARIES, *_STANDARD_LIBRARY, "<"))


def find_user_frame(frame: FrameType | None, stop: Callable[[str], bool]) -> FrameType | None:
    """Returns the innermost frame outside torch, the exporters and optexport, also of code without a file (``exec``).

    Args:
        stop: Returns True for a file at which the search ends without a result.
    """
    while frame is not None and not is_user_code(name := frame.f_code.co_filename):
        if stop(name):
            return None
        if name.startswith("<") and not str(frame.f_globals.get("__name__")).startswith("torch"):
            return frame
        frame = frame.f_back
    return frame


def describe_frame(frame: FrameType) -> str:
    """Returns the line that a frame is at: ``model.py:12: if x.max() > 3:``."""
    name = frame.f_code.co_filename
    return _format_line(name, frame.f_lineno, linecache.getline(name, frame.f_lineno).strip())


def find_line(error: BaseException) -> str | None:
    """Returns the innermost line outside torch, the exporters and optexport: ``model.py:12: if x.max() > 3:``."""
    return find_innermost_line(traceback.extract_tb(error.__traceback__))


def find_innermost_line(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """Returns the innermost line of a stack outside torch, the exporters and optexport."""
    frames = [frame for frame in stack if frame.line and is_user_code(frame.filename)]
    return _format_line(frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else None


def find_node_line(stack_trace: str | None) -> str | None:
    """Returns the innermost line in a node's stack trace outside torch, the exporters and optexport."""
    lines = re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.+)', stack_trace or "")
    # Nodes that torch.export adds have a path relative to its package.
    user = [line for line in lines if is_user_code(line[0]) and not line[0].startswith("torch/")]
    return _format_line(*user[-1]) if user else None


def _format_line(filename: str, number: int | str | None, text: str | None) -> str:
    return f"{Path(filename).name}:{number}: {text}".removesuffix(": ")


def describe_error_and_line(error: BaseException) -> str:
    """Returns the class of an error, the first line of its message, and the line that `find_line` gives."""
    line = find_line(error)
    text = describe_error(error).rstrip(": ")
    return text if line is None else f"{text} (at {line})"
