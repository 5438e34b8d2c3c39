"""What the commands show: tables on standard output, and how far they are on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from optexport.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from optexport._utils.progress import Progress


def echo(text: str, *, err: bool = False) -> None:
    """Prints text in which names of models, rules and files may stand: none of them steers a terminal."""
    click.echo(printable(text), err=err)


@contextlib.contextmanager
def prints_aside() -> Iterator[None]:
    """Within it, what is printed goes to standard error, from libraries in C too: a model's code may print anything."""
    import ctypes  # not for --help

    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as undone:
        with contextlib.suppress(OSError):  # as where one of the two is closed
            output = os.dup(1)
            undone.callback(os.close, output)
            os.dup2(2, 1)
            undone.callback(os.dup2, output, 1)
            undone.callback(ctypes.CDLL(None).fflush, None)  # or C would print the rest behind our result
        yield


def clean_warnings() -> None:
    """Has warnings printed like all other text: a TorchScript program may warn of anything, in any words.

    Only their first line begins at the margin: the others could be taken for what the program itself says. Where a user
    has no home, matplotlib tells of it where it would keep its fonts, which is nothing to whoever wants a report.
    """
    warnings.formatwarning = _printable_warning
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


_written = warnings.formatwarning


def _printable_warning(*arguments: Any, **options: Any) -> str:
    return printable(_written(*arguments, **options)).rstrip("\n").replace("\n", "\n    ") + "\n"


def console() -> Console:
    """Where tables go."""
    from optexport.cli._printable_console import PrintableConsole

    # Outside a terminal a table is not cut to 80 columns.
    return PrintableConsole(width=None if sys.stdout is not None and sys.stdout.isatty() else 200)


@contextlib.contextmanager
def show_progress(*, quiet: bool) -> Iterator[Progress]:
    """Shows the stages on standard error: a spinner on a terminal, plain lines elsewhere."""
    from optexport._utils.progress import Progress

    def plain(name: str, seconds: float | None) -> None:
        if seconds is not None:
            click.echo(f"{name}: {seconds:.1f} s", err=True)

    if quiet:
        yield Progress()
    elif sys.stderr is None or not sys.stderr.isatty():
        yield Progress(plain)
    else:
        from optexport.cli._printable_console import PrintableConsole

        shown = PrintableConsole(file=sys.stderr)
        with shown.status("starting") as status:

            def live(name: str, seconds: float | None) -> None:
                if seconds is None:
                    status.update(name)
                else:
                    shown.print(f"  {name:20} {seconds:6.1f} s", highlight=False)

            yield Progress(live)
