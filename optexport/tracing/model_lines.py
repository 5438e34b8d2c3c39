"""Finds the line of a model's code that an error came from."""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path

import torch

from optexport.tracing import dynamo_exporter

_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], dynamo_exporter.FOLDER)
)
_STANDARD_LIBRARY = tuple(
    str(Path(contextlib.__file__).with_name(f"{name}.py")) for name in ("contextlib", "functools")
)


def is_of_model(filename: str) -> bool:
    """Returns False for files of torch, the exporters and optexport, and for generated code."""
    return not filename.startswith((*_LIBRARIES, *_STANDARD_LIBRARY, "<"))


def line_of_model(error: BaseException) -> str | None:
    """Returns the model's innermost line in a traceback: ``model.py:12: if x.max() > 3:``."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.line and is_of_model(frame.filename)
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else None
