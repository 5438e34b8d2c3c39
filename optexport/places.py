"""Where a bundle may be written, which is told without importing torch and without writing anything."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from optexport.errors import ConfigError

MANIFEST = "manifest.json"
MEASUREMENTS = "measurements.json"


def check_place(output: Path) -> None:
    """Checks that a bundle may be written to a place, as far as can be told without writing there.

    Raises:
        ConfigError: Something else is there, or nothing can be written there.
    """
    try:
        check_replaceable(output)
        existing = next(folder for folder in output.parents if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is no folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"{existing} takes no files of this user")
        with contextlib.suppress(FileNotFoundError):
            os.lstat(existing / f"{output.name}{'-' * 24}")  # room for the name that it bears until it is whole
    except (OSError, ValueError) as error:
        raise ConfigError(f"nothing can be written there: {error}", place=f"export.output: {output}") from error


def check_replaceable(output: Path) -> None:
    """Only an empty folder, or a bundle, may be replaced.

    Raises:
        ConfigError: Something else is there.
    """
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_symlink() and output.is_dir():
        try:
            document = json.loads((output / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError):
            document = None
        names = {path.name for path in output.iterdir()}
        if isinstance(document, dict) and {"manifest_version", "digest", "files"} <= document.keys():
            ours = {MANIFEST, MEASUREMENTS, *(str(file.get("path")) for file in document["files"])}
            if names <= ours:
                return
            added = sorted(names - ours)
            raise ConfigError(
                f"it holds {', '.join(added[:3])}{', ...' if added[3:] else ''}, not of the bundle that is there",
                place=f"export.output: {output}",
                mend="Move that away, or choose another place.",
            )
        if not names:
            return
    raise ConfigError(
        "it exists and is no bundle, so it is not replaced",
        place=f"export.output: {output}",
        mend="Choose another place, or remove it.",
    )
