"""Where a run writes: where a bundle may be, what lies beside it, and what must not be written over.

Told without importing torch, and without writing anything.
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
# Says how the parts of a generative model, each a bundle of its own, belong together.
GENERATION = "generation.json"
SIGNATURE = "bundle.sig"
STATEMENT = "provenance.json"
SBOM = "sbom.cdx.json"
# What signing adds to a folder.
SIGNED = (SIGNATURE, STATEMENT, SBOM)
# What a manifest does not vouch for: itself, what may differ between two equal runs, what is made of both, and what
# signing adds.
UNLISTED = (MANIFEST, MEASUREMENTS, REPORT, *SIGNED)

# What a system answers that takes no more of a file: a full disk, a quota, and a limit on how large a file may be.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# And one that opens no more of them.
TOO_MANY = (errno.EMFILE, errno.ENFILE)
# In bytes: where the beginning of a file says what it is.
_BEGINNING = 4096


def beside(output: Path, what: str) -> Path:
    """What lies beside an output: its "baseline", or what a "failure" of its proof left."""
    return output.with_name(f"{output.name}-{what}")


def kept(output: Path) -> tuple[Path, ...]:
    """The folders that a run with this output may write, replace or remove."""
    return tuple(
        location for each in (output, beside(output, "baseline")) for location in (each, beside(each, "failure"))
    )


def as_path(given: object, name: str) -> Path:
    """A path that was given in Python, where it may be anything.

    Raises:
        ConfigError: It is none.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or "\0" in path:
        raise ConfigError(f"{given!r} is no path", location=name, hint="Give a str or a pathlib.Path.")
    return Path(path)


def check_utf8(folder: Path) -> None:
    """Checks that the libraries that are not written in Python can read and write files in a folder.

    Raises:
        ConfigError: Its path is not UTF-8.
    """
    path = os.path.abspath(folder)
    if path != path.encode("utf-8", "replace").decode("utf-8"):
        raise ConfigError(
            "the path of the folder is not UTF-8, and torch and ONNX Runtime open no file there",
            location=path,
            hint="Rename the folder.",
        )


def cache() -> Path | None:
    """Where results are kept: ``OPTEXPORT_CACHE``, or ``optexport`` among the user's caches; None where it is empty."""
    named = os.environ.get("OPTEXPORT_CACHE")
    try:
        if named is not None:
            return Path(named).expanduser().absolute() if named else None
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user id that the system does not know, as containers give
        return None
    return Path(caches) / "optexport"


def check_outside(option: str, path: Path, places: Iterable[Path], *, is_file: bool = True) -> None:
    """Checks that what an option names does not lie in a folder, or over a file, that must stay as it is.

    Args:
        is_file: Whether a file is named, which cannot lie where a folder has to be either.

    Raises:
        ConfigError: It does.
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
    """Checks that a file that is to be written is new, empty, or such a one already.

    Any other may be what a run reads, a model's weights among them, or the database of its tracking.

    Args:
        form: What such a file begins with.

    Raises:
        ConfigError: It is another, or cannot be read.
    """
    if not path.is_file():  # a pipe, as of a shell, would be waited for
        return
    try:
        with path.open("rb") as file:
            begun = file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error}", location=f"{option} {path}") from error
    if begun and not form.match(begun):
        raise ConfigError(f"it exists and is no {what}", location=f"{option} {path}", hint="Name another file.")


def check_place(output: Path) -> None:
    """Checks that a bundle may be written to a place, as far as can be told without writing there.

    Raises:
        ConfigError: Something else is there, or nothing can be written there.
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
            os.lstat(existing / f"{output.name}{'-' * 24}")  # room for the name that it bears until it is whole
    except (OSError, ValueError) as error:
        raise ConfigError(f"nothing can be written there: {error}", location=f"export.output: {output}") from error


def _bundle_around(path: Path) -> Path | None:
    """The bundle that a place lies in."""
    around = path.parents
    return next((at for at in around if (at / GENERATION).is_file() or _vouched_for(at / MANIFEST) is not None), None)


def _vouched_for(manifest: Path) -> list[PurePosixPath] | None:
    """The paths of the files in a manifest; None where it is none."""
    try:
        if not manifest.is_file():  # a pipe would be waited for
            return None
        document = json.loads(manifest.read_bytes())
        _ = document["manifest_version"], document["digest"]
        return [PurePosixPath(str(file["path"])) for file in document["files"]]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None


def check_replaceable(output: Path) -> None:
    """Only an empty folder, or a bundle, may be replaced.

    Raises:
        ConfigError: Something else is there.
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
