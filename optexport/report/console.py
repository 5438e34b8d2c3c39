"""Consoles that control characters of names cannot steer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from optexport.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


def printable_console(**options: Any) -> Console:
    """Returns a console that escapes control characters in everything except its own styles.

    Emoji codes are off, because a rule name such as ``python:fire:Mine`` contains one.

    Args:
        options: Options of `rich.console.Console`.
    """
    from rich.console import Console  # keeps --help fast
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*arguments, **options):
                yield Segment(text if control else printable(text), style, control)

        def on_broken_pipe(self) -> None:
            """Raises the BrokenPipeError; rich itself would exit the program."""
            raise

    return PrintableConsole(emoji=False, **options)
