"""Paths that users pass, and errors when files are written. Needs no torch."""

from __future__ import annotations

import codecs
import errno
import os
import re
from pathlib import Path

from optexport.errors import ConfigError

# Errors for no space to write: full disk, exceeded quota, exceeded file size limit.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors for too many open files.
TOO_MANY = (errno.EMFILE, errno.ENFILE)
# In bytes: the start of a file, which identifies its type.
_BEGINNING = 4096


def as_path(value: object, name: str) -> Path:
    """Converts an argument of the Python API to a path.

    Raises:
        ConfigError: The argument is not a path.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or "\0" in path:
        raise ConfigError(f"{value!r} is not a path", location=name, hint="Give a str or a pathlib.Path.")
    return Path(path)


def check_utf8(folder: Path) -> None:
    """Checks that a folder's path is UTF-8, because native libraries require it.

    Raises:
        ConfigError: The path is not UTF-8.
    """
    path = os.path.abspath(folder)
    if path != path.encode("utf-8", "replace").decode("utf-8"):
        raise ConfigError(
            "the path of the folder is not UTF-8, so torch and ONNX Runtime cannot open its files",
            location=path,
            hint="Rename the folder.",
        )


def check_overwritable(argument: str, path: Path, pattern: re.Pattern[bytes], kind: str) -> None:
    """Checks that an output file is new, empty, or an earlier output of the same kind.

    Any other file may be an input of the run, such as the weights, or the tracking database.

    Args:
        pattern: A pattern that matches the start of such an output.
        kind: The name of this kind of file, for the error.

    Raises:
        ConfigError: The file is of another kind or cannot be read.
    """
    if not path.is_file():  # a read from a pipe, for example of a shell, would block
        return
    try:
        with path.open("rb") as file:
            start = file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error}", location=f"`{argument}={path}`") from error
    if start and not pattern.match(start):
        raise ConfigError(
            f"the file has other content than an earlier {kind}, so it is not replaced",
            location=f"`{argument}={path}`",
            hint="Name another file.",
        )
