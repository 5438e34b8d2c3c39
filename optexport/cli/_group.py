"""Base classes of the commands: help, exit codes, error messages and JSON documents."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich_click import RichCommand, RichGroup

from optexport._utils import custom_code, signals
from optexport.cli._console import echo
from optexport.cli._failures import OUT_OF_MEMORY, Failure, check_working_directory, describe
from optexport.cli._option_names import name_options
from optexport.errors import OptexportError, printable
from optexport.redaction import redact_error

# Keys in the context data that click shares between the group and its commands.
_AS_JSON = "optexport.json"
_DEBUG = "optexport.debug"


def _remember(key: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def callback(context: click.Context, option: click.Parameter, value: bool) -> bool:  # noqa: ARG001 - click passes it
        context.meta[key] = context.meta.get(key, False) or value
        return value

    return callback


# click reads --json and --debug before other options, so that they apply to errors in those.
json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember(_AS_JSON), help="Print the result as JSON."
)
junit_option = click.option(
    "--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write the comparisons to this file, as JUnit XML."
)
key_option = click.option(
    "--key", type=click.Path(path_type=Path), help="Check the signature first, with this public key (PEM file)."
)
debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_remember(_DEBUG),
    help="Show the traceback of an error.",
)


def _forbid_code(context: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click passes it
    if value:
        os.environ[custom_code.VARIABLE] = "1"


no_custom_code_option = click.option(
    "--no-custom-code",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_forbid_code,
    help="Refuse python: sources, rules and metrics, rules of other packages, and trust_remote_code. "
    f"{custom_code.VARIABLE}=1 does the same.",
)


def print_json(document: Any) -> None:
    """Prints the JSON document of a command."""
    click.get_current_context().meta[_AS_JSON] = False
    click.echo(_as_json(document), nl=False)


def _as_json(document: Any) -> str:
    # GitHub's runner executes "##[" anywhere in a line. In JSON, it can only occur inside strings.
    return f"{json.dumps(document, indent=2)}\n".replace("##[", "##\\u005b")


def outcome(error: OptexportError | None) -> dict[str, Any]:
    """Returns the result of a command, for a JSON document."""
    return {
        "passed": error is None,
        "exit_code": 0 if error is None else error.exit_code,
        "error": None if error is None else str(error),
    }


class Command(RichCommand):
    """A command that also takes ``--debug``, names its options in errors, and whose help ends with examples.

    Args:
        examples: Command lines.
    """

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **options: Any) -> None:
        self.examples = examples
        title = "Examples:" if len(examples) > 1 else "Example:"
        # rich-click joins the lines of a paragraph.
        options["epilog"] = "\n\n".join([title, *(f"$ {line}" for line in examples)])
        super().__init__(*arguments, **options)
        debug_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:  # click reports an unknown option before it reads any
            for flag, key in (("--json", _AS_JSON), ("--debug", _DEBUG)):
                ctx.meta[key] = ctx.meta.get(key, False) or flag in arguments
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OptexportError as error:
            name_options(error)
            raise


class Group(RichGroup):
    """Turns errors into one message and an exit code. Prints the traceback only with ``--debug``."""

    command_class = Command
    # rich-click's own would frame errors; those of an option of the group must look like all others.
    main = click.Group.main

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except OSError as error:  # for instance if the help cannot be printed
            if error.errno == errno.EPIPE:
                raise
            raise click.ClickException(f"standard output: {error.strerror}") from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with signals.raising_on_signals():
                return self._invoke(ctx)
        except KeyboardInterrupt:  # a signal before its handlers were set, or after they were removed
            _fail(ctx, Failure(128 + (signals.ended_by() or signal.SIGINT), "interrupted"))
        except MemoryError:  # the memory was not enough to describe an error
            gc.collect()
            _fail(ctx, OUT_OF_MEMORY)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            check_working_directory()
            result = super().invoke(ctx)
            signals.check()
            return result
        except (click.exceptions.Exit, click.exceptions.Abort):
            raise
        except click.ClickException as error:
            _show_usage_error(ctx, error)
        except BaseException as error:  # a panic of a library written in Rust is not an Exception
            if (failure := describe(error)) is None:
                raise
            _fail(ctx, failure)


def _show_usage_error(ctx: click.Context, error: click.ClickException) -> NoReturn:
    error.message = printable(error.message)  # type: ignore[misc] # click quotes names of files as they are
    _print_document(ctx, Failure(error.exit_code, error.format_message()))
    if sys.stderr is not None:  # without it, click would print to standard output
        with contextlib.suppress(OSError):
            error.show()
    ctx.exit(error.exit_code)


def _fail(ctx: click.Context, failure: Failure) -> NoReturn:
    with contextlib.suppress(OSError):  # on a full disk only the exit code remains
        if ctx.meta.get(_DEBUG):
            echo(redact_error(traceback.format_exc().rstrip()), err=True)
        echo(failure.text, err=True)
    _print_document(ctx, failure)
    ctx.exit(failure.exit_code)


def _print_document(ctx: click.Context, failure: Failure) -> None:
    if document := _document(ctx, failure):
        with contextlib.suppress(OSError):  # on a full disk only the exit code remains
            click.echo(document, nl=False)


def _document(ctx: click.Context, failure: Failure) -> str:
    """Returns a failure as JSON if --json was set and no JSON was printed, otherwise ""."""
    if not ctx.meta.get(_AS_JSON):
        return ""
    ctx.meta[_AS_JSON] = False
    cause = failure.cause
    parity = None if cause is None or cause.parity is None else cause.parity.model_dump(mode="json")
    run_id = None if cause is None else cause.run_id
    document = {"passed": False, "exit_code": failure.exit_code, "error": failure.message, "mlflow_run_id": run_id}
    return _as_json({**document, "parity": parity})
