"""Renders Matplotlib figures to files."""

from __future__ import annotations

import io
import warnings
from typing import Any


def plot_file(figure: Any, file_format: str, **options: Any) -> bytes:
    """Renders a figure as ``png`` or ``svg``, without warnings about missing glyphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        figure.savefig(buffer := io.BytesIO(), format=file_format, **options)
    return buffer.getvalue()
