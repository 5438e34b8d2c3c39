"""Table of the errors that end a command: exit code, message and hint of each."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass

from optexport._utils import packages, signals
from optexport._utils.paths import NO_ROOM, TOO_MANY
from optexport.cache.folder import find_cache_folder
from optexport.errors import ConfigError, OptexportError, with_hint
from optexport.redaction import redact_error

_LIMITS = (errno.ENOMEM, errno.EFBIG, *TOO_MANY, *NO_ROOM)
# Message of the system's dynamic loader if memory is missing.
_UNMAPPED = "failed to map segment from shared object"
_MORE_MEMORY = "Raise the memory limit (ulimit -v) or use a machine with more memory, and run again."
_REPORT = "This is a bug in optexport. Please report it, with the output of the same command and --debug."


@dataclass(frozen=True)
class Failure:
    """Result of a command that failed.

    Attributes:
        exit_code: The exit code of the program.
        message: The message, with a hint on its last line if there is one. It contains no secrets.
        cause: The error of this package, if it is one.
    """

    exit_code: int
    message: str
    cause: OptexportError | None = None

    @property
    def text(self) -> str:
        """The message with its label, for a terminal."""
        return f"Error: {self.message}" if self.cause is None else self.cause.labelled


_NO_MEMORY = "out of memory"
OUT_OF_MEMORY = Failure(1, with_hint(_NO_MEMORY, _MORE_MEMORY))


@dataclass(frozen=True)
class _Row:
    """One row of the table.

    Attributes:
        kind: The type of exception.
        exit_code: The exit code.
        message: A template of {error}, {kind}, {file} and {reason}.
        hint: The hint, or a function that returns it for an error.
        numbers: The values of errno that the row is for; all if empty.
        condition: A further condition on the error.
    """

    kind: type[BaseException]
    exit_code: int
    message: str
    hint: str | Callable[[BaseException], str] | None = None
    numbers: Collection[int] = ()
    condition: Callable[[BaseException], bool] = lambda _: True

    def matches(self, error: BaseException) -> bool:
        is_kind = isinstance(error, self.kind) and (not self.numbers or _number(error) in self.numbers)
        return is_kind and self.condition(error)

    def failure(self, error: BaseException) -> Failure:
        message = self.message.format(
            error=redact_error(str(error)) or (_NO_MEMORY if isinstance(error, MemoryError) else ""),
            kind=type(error).__name__,
            file=getattr(error, "filename", None),
            reason=getattr(error, "strerror", None),
        )
        hint = self.hint(error) if callable(self.hint) else self.hint
        return Failure(self.exit_code, with_hint(message, hint))


def describe(error: BaseException) -> Failure | None:
    """Returns the message and exit code for an error, or None for a closed pipe.

    After a closed pipe, click ends the program without a message.
    """
    # Some libraries turn an interrupt during their imports into another error.
    signum = signals.received()
    if isinstance(error, KeyboardInterrupt) or signum is not None:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return Failure(128 + (signum or signal.SIGINT), redact_error(with_hint("interrupted", notes)))
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return None
    if isinstance(error, OptexportError):
        return Failure(error.exit_code, str(error), error)
    return next(row for row in _TABLE if row.matches(error)).failure(error)


def check_working_directory() -> None:
    """Checks that the working directory exists, because the libraries of torch would abort.

    Raises:
        FileNotFoundError: The working directory does not exist.
    """
    if not _has_working_directory():
        raise FileNotFoundError


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def _names_a_file(error: BaseException) -> bool:
    return getattr(error, "filename", None) is not None


def _number(error: BaseException) -> int | None:
    """Returns the errno of an error; libraries in C++ or Rust only give its text."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, MemoryError) or _UNMAPPED in str(error):
        return errno.ENOMEM
    return next((number for number in _LIMITS if os.strerror(number) in str(error)), None)


def _free_space_hint(error: BaseException) -> str:
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return f"Free disk space in {os.path.dirname(os.path.abspath(error.filename))}, and run again."
    folders = " and ".join(str(folder) for folder in (find_cache_folder(), tempfile.gettempdir()) if folder is not None)
    return f"Free disk space for standard output, the output folder, {folders}, and run again."


def _find_package_problem() -> str | None:
    """Returns which installed packages do not fit together, or None."""
    try:
        packages.check()
    except OptexportError as problem:
        return str(problem)
    return None


def _has_package_problem(error: BaseException) -> bool:  # noqa: ARG001 - the table passes it
    with contextlib.suppress(MemoryError):
        return _find_package_problem() is not None
    return False


def _defect_hint(error: BaseException) -> str:  # noqa: ARG001 - the table passes it
    try:
        return _find_package_problem() or _REPORT
    except MemoryError:  # not enough memory to check the packages
        return _MORE_MEMORY


# The first row that matches an error applies.
_TABLE = (
    _Row(BaseException, 1, "{error}", _MORE_MEMORY, (errno.ENOMEM,)),
    _Row(BaseException, 1, "{error}", "Raise the limit on file sizes (ulimit -f), and run again.", (errno.EFBIG,)),
    _Row(BaseException, 1, "{error}", "Raise the limit on open files (ulimit -n), and run again.", TOO_MANY),
    _Row(BaseException, 1, "{error}", _free_space_hint, NO_ROOM),
    _Row(
        PermissionError,
        2,
        "{file}: {reason}",
        "Run the command as a user with this permission.",
        condition=_names_a_file,
    ),
    _Row(
        OSError,
        2,
        "{file}: the name is too long for its file system",
        "Choose a shorter name.",
        (errno.ENAMETOOLONG,),
        _names_a_file,
    ),
    _Row(
        FileNotFoundError,
        2,
        "the working directory does not exist any more",
        "Change to an existing folder, and run again.",
        condition=lambda error: not _names_a_file(error) and not _has_working_directory(),
    ),
    # Python 3.11 raises a RuntimeError with this message.
    _Row(
        RuntimeError,
        2,
        "a symbolic link points to itself: {error}",
        condition=lambda error: str(error).startswith("Symlink loop"),
    ),
    _Row(SystemExit, 1, "code of the model or a plugin called sys.exit before the command was finished"),
    # A panic of a library written in Rust is not an Exception.
    _Row(
        BaseException,
        1,
        "code of the model or a plugin raised {kind}, which is not an Exception: {error}",
        condition=lambda error: not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime",
    ),
    _Row(BaseException, ConfigError.exit_code, "{kind}: {error}", _defect_hint, condition=_has_package_problem),
    # A defect of this package or of a library.
    _Row(BaseException, 1, "{kind}: {error}", _defect_hint),
)
