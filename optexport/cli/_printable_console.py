"""A rich console for text from untrusted sources."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from optexport.errors import printable


class PrintableConsole(Console):
    """Console that escapes control characters in everything except its own styles.

    Emoji codes are off, because a rule name such as ``python:fire:Mine`` contains one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError, so that the command handles it as for all other output.

        rich itself would exit the program.
        """
        raise
