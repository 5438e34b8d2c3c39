"""The line of a model's own code that an error came from, behind those of torch and of what exports."""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path

import torch

from optexport.tracing import transformers_exporter

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], transformers_exporter.FOLDER)
)
_STANDARD_LIBRARY = tuple(
    str(Path(contextlib.__file__).with_name(f"{name}.py")) for name in ("contextlib", "functools")
)


def is_of_model(filename: str) -> bool:
    """Whether a file is a model's own, and of none of the libraries that trace it."""
    return not filename.startswith((*_LIBRARIES, *_STANDARD_LIBRARY, "<"))


def line_of_model(error: BaseException) -> str | None:
    """The innermost line of the model's own code that an error came from: ``modeling_x.py:12: if x.max() > 3:``."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line and is_of_model(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}" if own else None
