"""Writes the HTML files of ``optexport report`` and ``optexport diff``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from optexport._utils.paths import NO_ROOM, check_overwritable
from optexport.bundle.layout import check_outside
from optexport.errors import ConfigError

_HTML_START = re.compile(rb"(<!--.*?-->\s*)*<(!doctype\s+)?html\b", re.DOTALL | re.IGNORECASE)


def check_target(argument: str, path: Path, bundles: Iterable[Path]) -> None:
    """Checks that an HTML file may be written: outside of bundles, and only over an HTML file.

    Raises:
        ConfigError: The file must not be written.
    """
    check_outside(argument, path, bundles)
    check_overwritable(argument, path, _HTML_START, "HTML file")


def write(path: Path, text: str, argument: str) -> None:
    """Writes a file atomically, so that a full disk does not damage an earlier one.

    Raises:
        ConfigError: The file cannot be written.
        OSError: The disk is full.
    """
    # A pipe or a device cannot be replaced.
    is_atomic = not path.is_relative_to("/dev") and (not path.exists() or path.is_file())
    draft = path.resolve().with_name(f".{path.name}.{os.getpid()}") if is_atomic else path
    try:
        try:
            draft.write_text(text, encoding="utf-8")
            if is_atomic:
                if path.exists():
                    shutil.copymode(path, draft)
                draft.replace(path.resolve())
        finally:
            if is_atomic:
                draft.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in NO_ROOM:
            error.filename = str(path)
            raise
        raise ConfigError(f"cannot write the file: {error}", location=f"`{argument}={path}`") from error
