"""How every command ends: with one message and an exit code, and with one JSON document where that is asked for."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from optexport._utils import packages, signals
from optexport.bundle.layout import NO_ROOM, TOO_MANY, cache
from optexport.cli._console import echo
from optexport.config import custom_code
from optexport.errors import OptexportError, printable
from optexport.redaction import redact_error

# What a command was asked for, in the part of click's contexts that the program's and the command's share.
_AS_JSON = "optexport.json"
_DEBUG = "optexport.debug"
# What the system's loader of libraries says where there is no memory for one.
_UNMAPPED = "failed to map segment from shared object"


def _remember(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def callback(context: click.Context, option: click.Parameter, given: bool) -> bool:  # noqa: ARG001 - click's
        context.meta[key] = context.meta.get(key, False) or given
        return given

    return callback


# Both are read before any other, so that what is wrong with others is told as they say.
json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember(_AS_JSON), help="Print the result as JSON."
)
junit_option = click.option(
    "--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write what was compared as JUnit XML."
)
key_option = click.option(
    "--key", type=click.Path(path_type=Path), help="Check its signature first, with this public key (PEM)."
)
debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember(_DEBUG),
    help="Show the traceback of an error.",
)


def _forbid_code(context: click.Context, parameter: click.Parameter, given: bool) -> None:  # noqa: ARG001 - click's
    if given:
        os.environ[custom_code.VARIABLE] = "1"


no_custom_code_option = click.option(
    "--no-custom-code",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_forbid_code,
    help=f"Refuse what runs code of others, as {custom_code.VARIABLE}=1 does.",
)


def print_json(document: Any) -> None:
    """Prints the one document of a command."""
    click.get_current_context().meta[_AS_JSON] = False
    click.echo(_as_json(document), nl=False)


def _as_json(document: Any) -> str:
    # GitHub's runner takes "##[" for a command to itself wherever it is printed; it can stand in strings alone.
    return f"{json.dumps(document, indent=2)}\n".replace("##[", "##\\u005b")


def outcome(error: OptexportError | None) -> dict[str, Any]:
    """How a command ended, for machines."""
    return {
        "passed": error is None,
        "exit_code": 0 if error is None else error.exit_code,
        "error": None if error is None else str(error),
    }


class Command(click.Command):
    """A command that takes ``--debug`` behind its name too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        debug_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:  # of an option that click does not know it tells before it reads any
            for flag, key in (("--json", _AS_JSON), ("--debug", _DEBUG)):
                ctx.meta[key] = ctx.meta.get(key, False) or flag in given
            raise


class Group(click.Group):
    """Turns errors into one message and their exit code; a traceback only with ``--debug``."""

    command_class = Command

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except OSError as error:  # as of help that could not be printed
            if error.errno == errno.EPIPE:
                raise
            raise click.ClickException(f"standard output: {error.strerror}") from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with signals.raising_on_signals():
                return self._invoke(ctx)
        except KeyboardInterrupt:  # while the handlers of signals were installed or removed
            _fail(ctx, "interrupted", 128 + (signals.ended_by() or signal.SIGINT))
        except MemoryError:  # not even what went wrong can be told
            gc.collect()
            _fail(ctx, f"there is no more memory\n  {_room(errno.ENOMEM)}", 1)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            if not _has_working_directory():  # torch's libraries would end the program while they are imported
                raise FileNotFoundError
            result = super().invoke(ctx)
            signals.check()
            return result
        except click.ClickException as error:
            error.message = printable(error.message)  # type: ignore[misc] # click tells of files as they are called
            _tell_machine(ctx, error.format_message(), error.exit_code)
            if sys.stderr is not None:  # in its place click would take standard output
                with contextlib.suppress(OSError):
                    error.show()
            ctx.exit(error.exit_code)
        except (click.exceptions.Exit, click.exceptions.Abort):
            raise
        except BaseException as error:  # a panic of a library written in Rust is no Exception
            # Some libraries turn an interrupt in the middle of their imports into errors of their own.
            signum = signals.received()
            if isinstance(error, KeyboardInterrupt) or signum is not None:
                told = "\n  ".join(["interrupted", *getattr(error, "__notes__", ())])
                _fail(ctx, redact_error(told), 128 + (signum or signal.SIGINT))
            if isinstance(error, OSError) and error.errno == errno.EPIPE:  # the reader went away: click ends quietly
                raise
            if isinstance(error, OptexportError):
                _fail(ctx, str(error), error.exit_code, error)
            if (number := _no_room(error)) is not None:
                _fail(ctx, f"{redact_error(str(error)) or 'there is no more memory'}\n  {_room(number, error)}", 1)
            if isinstance(error, PermissionError) and error.filename is not None:
                _fail(ctx, f"{error.filename}: this user may not do that: {error.strerror}", 2)
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and error.filename is not None:
                _fail(ctx, f"{error.filename}: the name is too long for its file system\n  Choose a shorter one.", 2)
            if isinstance(error, FileNotFoundError) and error.filename is None and not _has_working_directory():
                _fail(ctx, "the working directory was removed\n  Change to one that is there, and run again.", 2)
            if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # as Python 3.11 says it
                _fail(ctx, f"a link leads to itself: {error}", 2)
            if isinstance(error, SystemExit):
                _fail(ctx, "code of a model or a plugin called sys.exit, so the work is not done", 1)
            told = f"{type(error).__name__}: {redact_error(str(error))}"
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                _fail(ctx, f"code of a model or a plugin raised what is no error, so the work is not done: {told}", 1)
            try:
                packages.check()
            except OptexportError as unmet:
                _fail(ctx, f"{told}\n  {unmet}", unmet.exit_code)
            except MemoryError:  # of which what failed first was none in name
                _fail(ctx, f"{told}\n  {_room(errno.ENOMEM)}", 1)
            # A defect of ours, or of a library: still one message.
            _fail(ctx, f"{told}\n  This is a defect: please report it, with --debug.", 1)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def _no_room(error: BaseException) -> int | None:
    """The number of an error that says that nothing more is taken. Libraries not written in Python say so in words."""
    numbers = (*NO_ROOM, *TOO_MANY, errno.ENOMEM)
    if isinstance(error, OSError):
        return error.errno if error.errno in numbers else None
    if isinstance(error, MemoryError) or _UNMAPPED in str(error):
        return errno.ENOMEM
    return next((number for number in numbers if os.strerror(number) in str(error)), None)


def _room(number: int, error: BaseException | None = None) -> str:
    """Where to make room: an error of Python's names the file, a library that finds none does not say where."""
    if number == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f), and run again."
    if number in TOO_MANY:
        return "Raise the limit on open files (ulimit -n), and run again."
    if number == errno.ENOMEM:
        return "Raise the limit on memory (ulimit -v), or give the machine more, and run again."
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return f"Make room where {os.path.dirname(os.path.abspath(error.filename))} lies, and run again."
    places = [str(location) for location in (cache(), tempfile.gettempdir()) if location is not None]
    return f"Make room where standard output goes, or where the output, {' or '.join(places)} lies, and run again."


def _fail(ctx: click.Context, message: str, code: int, error: OptexportError | None = None) -> NoReturn:
    with contextlib.suppress(OSError):  # the exit code tells those whose disk takes no message
        if ctx.meta.get(_DEBUG):
            echo(redact_error(traceback.format_exc().rstrip()), err=True)
        echo(f"Error: {message}", err=True)
    _tell_machine(ctx, message, code, error)
    ctx.exit(code)


def _tell_machine(ctx: click.Context, message: str, code: int, error: OptexportError | None = None) -> None:
    if told := _failure(ctx, message, code, error):
        with contextlib.suppress(OSError):  # as for the message
            click.echo(told, nl=False)


def _failure(ctx: click.Context, message: str, code: int, error: OptexportError | None = None) -> str:
    """A failure as the one document of a command that was asked for one and has printed none; else nothing."""
    if not ctx.meta.get(_AS_JSON):
        return ""
    ctx.meta[_AS_JSON] = False
    proof = None if error is None or error.proof is None else error.proof.model_dump(mode="json")
    return _as_json({"passed": False, "exit_code": code, "error": message, "parity": proof})
