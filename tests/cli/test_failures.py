"""Exit codes and messages of the errors that end a command."""

from __future__ import annotations

import errno
import os

import pytest

from optexport.cli._failures import describe
from optexport.errors import ConfigError, GateError

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
ROWS: list[tuple[BaseException, int, str]] = [
    (ConfigError("no", hint="Hint."), 2, "no\nHint: Hint."),
    (GateError("no"), 6, "no"),
    (MemoryError(), 1, "out of memory\nHint: Raise the memory limit"),
    (
        OSError(errno.EFBIG, os.strerror(errno.EFBIG), "f"),
        1,
        "File too large: 'f'\nHint: Raise the limit on file sizes",
    ),
    (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), 1, "system\nHint: Raise the limit on open files"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b"), 1, "'/a/b'\nHint: Free disk space in /a,"),
    (
        PermissionError(errno.EACCES, "Permission denied", "f"),
        2,
        "f: Permission denied\nHint: Run the command as a user",
    ),
    (OSError(errno.ENAMETOOLONG, "File name too long", "f"), 2, "f: the name is too long"),
    (RuntimeError("Symlink loop from 'a'"), 2, "a symbolic link points to itself: Symlink loop from 'a'"),
    (SystemExit(0), 1, "called sys.exit"),
    (GeneratorExit("x"), 1, "raised GeneratorExit, which is not an Exception: x"),
    (PANIC("x"), 1, "PanicException: x\nHint: This is a bug"),
    (ValueError("http://me:hunter2@host {x}"), 1, "ValueError: http://***@host {x}\nHint: This is a bug"),
    (AssertionError(), 1, "AssertionError: \nHint: This is a bug"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "f"), 1, "This is a bug"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "exit_code", "message"), ROWS, ids=[type(row[0]).__name__ for row in ROWS])
def test_exit_code_and_message_of_an_error(error: BaseException, exit_code: int, message: str) -> None:
    failure = describe(error)
    assert failure is not None
    assert failure.exit_code == exit_code
    assert message in failure.message
    assert failure.cause is (error if isinstance(error, ConfigError | GateError) else None)


def test_closed_pipe_is_left_to_click() -> None:
    assert describe(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None
