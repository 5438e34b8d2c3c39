"""Console output of the commands: tables on stdout, warnings on stderr."""

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
from optexport.report.console import printable_console

if TYPE_CHECKING:
    from rich.console import Console


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
