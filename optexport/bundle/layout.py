"""Names and paths of a run's output, and checks that protect other files from it.

Needs no torch and writes nothing.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from optexport.errors import ConfigError

MANIFEST = "manifest.json"
MEASUREMENTS = "measurements.json"
REFERENCE = "reference.safetensors"
REPORT = "report.html"
# Describes how the parts of a generative model, each of them a bundle, work together.
GENERATION = "generation.json"
SIGNATURE = "bundle.sig"
STATEMENT = "provenance.json"
SBOM = "sbom.cdx.json"
# Files that signing adds to a folder.
SIGNED = (SIGNATURE, STATEMENT, SBOM)
# Files that the manifest does not list: itself, the values that differ between equal runs, the report made from both,
# and the files of a signature.
UNLISTED = (MANIFEST, MEASUREMENTS, REPORT, *SIGNED)

# Errors for no space to write: full disk, exceeded quota, exceeded file size limit.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors for too many open files.
TOO_MANY = (errno.EMFILE, errno.ENFILE)
# In bytes: the start of a file, which identifies its type.
_BEGINNING = 4096


def beside(output: Path, what: str) -> Path:
    """Returns the path of an output's "baseline", or of its "failure" after a failed check."""
    return output.with_name(f"{output.name}-{what}")


def kept(output: Path) -> tuple[Path, ...]:
    """Returns the folders that a run with this output may write, replace or remove."""
    return tuple(
        location for each in (output, beside(output, "baseline")) for location in (each, beside(each, "failure"))
    )


def as_path(given: object, name: str) -> Path:
    """Converts an argument of the Python API to a path.

    Raises:
        ConfigError: The argument is not a path.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or "\0" in path:
        raise ConfigError(f"{given!r} is no path", location=name, hint="Give a str or a pathlib.Path.")
    return Path(path)


def check_utf8(folder: Path) -> None:
    """Checks that a folder's path is UTF-8, because native libraries require it.

    Raises:
        ConfigError: The path is not UTF-8.
    """
    path = os.path.abspath(folder)
    if path != path.encode("utf-8", "replace").decode("utf-8"):
        raise ConfigError(
            "the path of the folder is not UTF-8, and torch and ONNX Runtime open no file there",
            location=path,
            hint="Rename the folder.",
        )


def cache() -> Path | None:
    """Returns the folder of the cache, or None if the cache is off.

    The folder is ``OPTEXPORT_CACHE``, by default ``optexport`` in the user's cache folder. An empty variable turns the
    cache off.
    """
    named = os.environ.get("OPTEXPORT_CACHE")
    try:
        if named is not None:
            return Path(named).expanduser().absolute() if named else None
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # user ids in containers may have no home folder
        return None
    return Path(caches) / "optexport"


def check_outside(option: str, path: Path, places: Iterable[Path], *, is_file: bool = True) -> None:
    """Checks that the path of an option does not overlap protected paths or a bundle.

    Args:
        places: The protected files and folders.
        is_file: True if the option names a file. A file cannot take the path of a folder either.

    Raises:
        ConfigError: The path overlaps one of them.
    """
    named = path.resolve()
    if is_file and named.is_dir():
        raise ConfigError("it is a folder", location=f"{option} {path}", hint="Name a file.")
    for location in places:
        if named.is_relative_to(location.resolve()) or (is_file and named in location.resolve().parents):
            raise ConfigError(f"it would change {location}", location=f"{option} {path}", hint="Name another place.")
    if (bundle := _bundle_around(named)) is not None:
        raise ConfigError(
            f"it lies in the bundle {bundle}, which would hold what is not its own",
            location=f"{option} {path}",
            hint="Name another place.",
        )


def check_written_over(option: str, path: Path, form: re.Pattern[bytes], what: str) -> None:
    """Checks that an output file is new, empty, or an earlier output of the same kind.

    Any other file may be an input of the run, such as the weights, or the tracking database.

    Args:
        form: A pattern that matches the start of such an output.
        what: The name of this kind of file, for the error.

    Raises:
        ConfigError: The file is of another kind or cannot be read.
    """
    if not path.is_file():  # a read from a pipe, for example of a shell, would block
        return
    try:
        with path.open("rb") as file:
            begun = file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error}", location=f"{option} {path}") from error
    if begun and not form.match(begun):
        raise ConfigError(f"it exists and is no {what}", location=f"{option} {path}", hint="Name another file.")


def check_place(output: Path) -> None:
    """Checks that a bundle can be written to a path, without writing there.

    Raises:
        ConfigError: The path contains something else, or is not writable.
    """
    try:
        check_replaceable(output)
        if (bundle := _bundle_around(output)) is not None:
            raise ConfigError(
                f"it lies in the bundle {bundle}, which would hold what is not its own",
                location=f"export.output: {output}",
                hint="Choose another place.",
            )
        existing = next(folder for folder in output.parents if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is no folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"{existing} takes no files of this user")
        with contextlib.suppress(FileNotFoundError):
            # The temporary name of an unfinished bundle is this long.
            os.lstat(existing / f"{output.name}{'-' * 24}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"nothing can be written there: {error}", location=f"export.output: {output}") from error


def _bundle_around(path: Path) -> Path | None:
    """Returns the bundle that contains a path, or None."""
    around = path.parents
    return next((at for at in around if (at / GENERATION).is_file() or _vouched_for(at / MANIFEST) is not None), None)


def _vouched_for(manifest: Path) -> list[PurePosixPath] | None:
    """Returns the file paths in a manifest, or None if it is not a manifest."""
    try:
        if not manifest.is_file():  # a read from a pipe would block
            return None
        document = json.loads(manifest.read_bytes())
        _ = document["manifest_version"], document["digest"]
        return [PurePosixPath(str(file["path"])) for file in document["files"]]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None


def check_replaceable(output: Path) -> None:
    """Checks that an output is absent, an empty folder or a bundle.

    Raises:
        ConfigError: The path contains something else.
    """
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_symlink() and output.is_dir():
        if (files := _vouched_for(output / MANIFEST)) is not None:
            names = {path.relative_to(output).as_posix() for path in output.rglob("*")}
            ours = {*UNLISTED, *(str(path) for file in files for path in (file, *file.parents))}
            if names <= ours:
                return
            added = sorted(names - ours)
            raise ConfigError(
                f"it holds {', '.join(added[:3])}{', ...' if added[3:] else ''}, not of the bundle that is there",
                location=f"export.output: {output}",
                hint="Move that away, or choose another place.",
            )
        if not any(output.iterdir()):
            return
    raise ConfigError(
        "it exists and is no bundle, so it is not replaced",
        location=f"export.output: {output}",
        hint="Choose another place, or remove it.",
    )
