"""Console output of the commands: tables on stdout, progress and warnings on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from optexport.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from optexport._utils.progress import Progress


def echo(text: str, *, err: bool = False) -> None:
    """Prints text, with control characters escaped.

    Names of models, rules and files come from others and could otherwise steer the terminal.

    Args:
        text: The text.
        err: Print to standard error.
    """
    click.echo(printable(text), err=err)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects standard output to standard error, including the output of C libraries.

    The code of a model may print anything, and standard output is reserved for the result.
    """
    import ctypes  # keeps --help fast

    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as undone:
        with contextlib.suppress(OSError):  # for instance if one of the two is closed
            output = os.dup(1)
            undone.callback(os.close, output)
            os.dup2(2, 1)
            undone.callback(os.dup2, output, 1)
            undone.callback(ctypes.CDLL(None).fflush, None)  # otherwise C prints its buffer after the result
        yield


def clean_warnings() -> None:
    """Escapes control characters in warnings, and indents all lines after the first.

    A TorchScript program may warn in any words, so its later lines could pass for messages of optexport. Also silences
    matplotlib, which logs the location of its font cache if a user has no home.
    """
    warnings.formatwarning = _printable_warning
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


_written = warnings.formatwarning


def _printable_warning(*arguments: Any, **options: Any) -> str:
    return printable(_written(*arguments, **options)).rstrip("\n").replace("\n", "\n    ") + "\n"


def console() -> Console:
    """Returns a console for tables on standard output."""
    # Outside a terminal, rich would cut tables to 80 columns.
    return printable_console(width=None if sys.stdout is not None and sys.stdout.isatty() else 200)


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


@contextlib.contextmanager
def show_progress(*, quiet: bool) -> Iterator[Progress]:
    """Shows the steps on standard error: also the running one on a terminal, plain lines elsewhere.

    Args:
        quiet: Show nothing.
    """
    from optexport._utils.progress import Progress

    progress = Progress()
    if quiet:
        yield progress
    elif sys.stderr is None or not sys.stderr.isatty():
        progress.note = partial(echo, err=True)
        progress.announce = partial(_print_step, progress, progress.note)
        yield progress
    else:
        with _show_running_step(progress):
            yield progress


def _print_step(progress: Progress, print_line: Callable[[str], None], name: str, seconds: float | None) -> None:
    if seconds is not None:
        print_line(f"{progress.count} {name:<26} {seconds:7.1f} s")


@contextlib.contextmanager
def _show_running_step(progress: Progress) -> Iterator[None]:
    """Shows the running step with its elapsed time below the lines of the finished ones."""
    from rich.progress import Progress as Display
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    terminal = printable_console(file=sys.stderr)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Display(*columns, console=terminal, transient=True) as display:
        task = display.add_task("starting", total=None)
        progress.note = partial(terminal.print, highlight=False, markup=False)

        def announce(name: str, seconds: float | None) -> None:
            if seconds is None:
                display.reset(task, description=f"{progress.count} {name}")
            _print_step(progress, progress.note, name, seconds)

        progress.announce = announce
        yield
