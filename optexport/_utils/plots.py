"""Writes a figure of Matplotlib as a file."""

from __future__ import annotations

import io
import warnings
from typing import Any


def plot_file(figure: Any, form: str, **options: Any) -> bytes:
    """A figure as ``png`` or ``svg``; letters of a name that the font lacks are boxes there, and no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        figure.savefig(written := io.BytesIO(), format=form, **options)
    return written.getvalue()
