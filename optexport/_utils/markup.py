"""Texts for tables and pages: sizes with units, and Markdown."""

from __future__ import annotations

import re

from optexport.errors import on_one_line

_PRECISE = 10  # below this, a ratio has two decimals
_WIDE = 1.1  # the upper over the lower end of an interval that is shown


def times_as_fast(speedup: float, low: float, high: float) -> str:
    """Returns a ratio of times in words, with its interval if that is wide: 1.42 (1.21 to 1.50) times as fast."""
    decimals = 2 if speedup < _PRECISE else 0
    interval = f" ({low:.{decimals}f} to {high:.{decimals}f})" if high / low > _WIDE else ""
    return f"{speedup:.{decimals}f}{interval} times as fast"


def size_in_words(size: int) -> str:
    """Returns a size with a unit, such as ``90.9 MB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def escape_markdown(text: str) -> str:
    """Escapes a text for a line or a table cell of Markdown."""
    return re.sub(r"[\\`*|<>\[\]~&]|\b_|_\b", r"\\\g<0>", on_one_line(text))


def table_row(*cells: str) -> str:
    """Returns a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
