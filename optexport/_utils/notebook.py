"""Text and HTML of results, for Python prompts and notebooks."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 100  # characters
_PREFORMATTED = '<pre style="line-height: normal">{code}</pre>'


def as_text(show: Callable[[Console], None]) -> str:
    """Returns what a function prints."""
    from rich.console import Console  # keeps the import of optexport fast

    text = io.StringIO()
    show(Console(file=text, width=_WIDTH, emoji=False, no_color=True, force_jupyter=False))
    return text.getvalue()


def as_html(show: Callable[[Console], None]) -> str:
    """Returns what a function prints as HTML, with colors."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    console = Console(file=io.StringIO(), width=_WIDTH, emoji=False, record=True, force_jupyter=False)
    show(console)
    return console.export_html(inline_styles=True, theme=DEFAULT_TERMINAL_THEME, code_format=_PREFORMATTED)


def preformatted(text: str) -> str:
    """Returns a text as HTML."""
    return _PREFORMATTED.format(code=html.escape(text))
