"""What the commands show: tables on standard output, and how far they are on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from optexport.stages import Stages


def console() -> Any:
    """Where tables go."""
    from rich.console import Console

    # Outside a terminal a table is not cut to 80 columns.
    return Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 200)


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Stages]:
    """Shows the stages on standard error: a spinner on a terminal, plain lines elsewhere."""
    from optexport.stages import Stages

    def plain(name: str, seconds: float | None) -> None:
        if seconds is not None:
            click.echo(f"{name}: {seconds:.1f} s", err=True)

    if quiet:
        yield Stages()
    elif sys.stderr is None or not sys.stderr.isatty():
        yield Stages(plain)
    else:
        from rich.console import Console

        shown = Console(file=sys.stderr)
        with shown.status("starting") as status:

            def live(name: str, seconds: float | None) -> None:
                if seconds is None:
                    status.update(name)
                else:
                    shown.print(f"  {name:20} {seconds:6.1f} s", highlight=False)

            yield Stages(live)
