"""Names and paths of a run's output, and checks that protect other files from it.

Needs no torch and writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from optexport.errors import ConfigError

MANIFEST = "manifest.json"
MEASUREMENTS = "measurements.json"
REFERENCE = "reference.safetensors"
REPORT = "report.html"
# Reproduces a failed check, in the folder of the failure.
SCRIPT = "reproduce.py"
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


def sibling(output: Path, kind: str) -> Path:
    """Returns the path of an output's "baseline", or of its "failure" after a failed check."""
    return output.with_name(f"{output.name}-{kind}")


def output_folders(output: Path) -> tuple[Path, ...]:
    """Returns the folders that a run with this output may write, replace or remove."""
    bundles = (output, sibling(output, "baseline"))
    return tuple(folder for bundle in bundles for folder in (bundle, sibling(bundle, "failure")))


def check_outside(argument: str, path: Path, protected: Iterable[Path], *, is_file: bool = True) -> None:
    """Checks that the path of an argument does not overlap protected paths or a bundle.

    Args:
        protected: The protected files and folders.
        is_file: True if the argument names a file. A file cannot take the path of a folder either.

    Raises:
        ConfigError: The path overlaps one of them.
    """
    resolved = path.resolve()
    if is_file and resolved.is_dir():
        raise ConfigError("the path is a folder, not a file", location=f"`{argument}={path}`", hint="Name a file.")
    for protected_path in protected:
        if resolved.is_relative_to(protected_path.resolve()) or (
            is_file and resolved in protected_path.resolve().parents
        ):
            raise ConfigError(
                f"writing this path would change {protected_path}",
                location=f"`{argument}={path}`",
                hint="Choose another path.",
            )
    if (bundle := _find_bundle_around(resolved)) is not None:
        raise ConfigError(
            f"the path is inside the bundle {bundle}, which may contain only its own files",
            location=f"`{argument}={path}`",
            hint="Choose another path.",
        )


def check_output_path(output: Path) -> None:
    """Checks that a bundle can be written to a path, without writing there.

    Raises:
        ConfigError: The path contains something else, or is not writable.
    """
    try:
        check_replaceable(output)
        if (bundle := _find_bundle_around(output)) is not None:
            raise ConfigError(
                f"the output is inside the bundle {bundle}, which may contain only its own files",
                location=f"export.output: {output}",
                hint="Choose another output.",
            )
        existing = next(folder for folder in output.parents if folder.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"this user may not write to {existing}")
        with contextlib.suppress(FileNotFoundError):
            # The temporary name of an unfinished bundle is this long.
            os.lstat(existing / f"{output.name}{'-' * 24}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the output cannot be written: {error}", location=f"export.output: {output}") from error


def _find_bundle_around(path: Path) -> Path | None:
    """Returns the bundle that contains a path, or None."""
    return next((folder for folder in path.parents if _is_bundle(folder)), None)


def _is_bundle(folder: Path) -> bool:
    return (folder / GENERATION).is_file() or _find_listed_files(folder / MANIFEST) is not None


def _find_listed_files(manifest: Path) -> list[PurePosixPath] | None:
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
        if (files := _find_listed_files(output / MANIFEST)) is not None:
            names = {path.relative_to(output).as_posix() for path in output.rglob("*")}
            listed = {*UNLISTED, *(str(path) for file in files for path in (file, *file.parents))}
            if names <= listed:
                return
            added = sorted(names - listed)
            names_text = f"{', '.join(added[:3])}{', ...' if added[3:] else ''}"
            raise ConfigError(
                f"the folder has files that are not part of its bundle: {names_text}",
                location=f"export.output: {output}",
                hint="Move these files to another folder, or choose another output.",
            )
        if not any(output.iterdir()):
            return
    raise ConfigError(
        "the path exists and is not a bundle, so it is not replaced",
        location=f"export.output: {output}",
        hint="Choose another output, or remove the path.",
    )
