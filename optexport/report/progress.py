"""Shows the steps of a run on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial

import click

from optexport._utils.progress import Progress
from optexport.errors import printable
from optexport.report.console import printable_console


@contextlib.contextmanager
def show_progress(shown: bool | Progress | None) -> Iterator[Progress]:
    """Shows the steps on standard error: also the running one on a terminal, plain lines elsewhere.

    Args:
        shown: Whether to show them; None shows them in notebooks and at Python prompts. A progress of the caller is
            returned as it is.
    """
    if isinstance(shown, Progress):
        yield shown
        return
    progress = Progress()
    if not _is_shown(shown):
        yield progress
    elif sys.stderr is None or not sys.stderr.isatty():
        progress.note = _print_line
        progress.announce = partial(_print_step, progress, progress.note)
        yield progress
    else:
        with _show_running_step(progress):
            yield progress


def choose_printer(shown: bool | None) -> Callable[[str], None]:
    """Returns a function that prints a line on standard error, or does nothing; None is as for `show_progress`."""
    return _print_line if _is_shown(shown) else lambda text: None


def _is_shown(shown: bool | None) -> bool:
    return hasattr(sys, "ps1") if shown is None else shown  # set by Python's prompt and by IPython, also in notebooks


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


def _print_line(text: str) -> None:
    click.echo(printable(text), err=True)
