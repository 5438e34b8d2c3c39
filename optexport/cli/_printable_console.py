"""A console of rich for text of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from optexport.errors import printable


class PrintableConsole(Console):
    """Prints styles of its own, and as plain text whatever would steer a terminal in what it is given.

    The name of a rule, ``python:fire:Mine``, is no picture of a fire either.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Lets the command end as with any other output that nobody reads; rich itself would leave the program."""
        raise
