"""File digests of a bundle, and checks that its files match the manifest. Needs no torch."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path, PurePosixPath

from optexport._utils import atomic_dir
from optexport._utils.paths import check_utf8
from optexport.bundle import digest_json
from optexport.bundle.layout import GENERATION, MANIFEST, MEASUREMENTS, REPORT, UNLISTED
from optexport.bundle.manifest import VERSION, FileRecord, Manifest
from optexport.errors import BundleError, ConfigError, unreadable
from optexport.exporters import registry

_LINK_HINT = "Remove it. If the bundle needs it, copy the bundle again with the files that links point to."


def file_records(folder: Path) -> list[FileRecord]:
    """Returns path, size in bytes and digest of every file that a manifest lists."""
    return [
        FileRecord(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in UNLISTED
    ]


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, *, report: bool = True) -> Manifest:
    """Reads the manifest and checks that the bundle contains exactly its files, unchanged.

    Args:
        report: False skips the report, for example before it is written again.

    Raises:
        ConfigError: The folder is not a bundle.
        BundleError: A file is missing, added or changed.
    """
    manifest = read_structure(folder)
    check_unchanged(folder, manifest, report=report)
    return manifest


def read_structure(folder: Path) -> Manifest:
    """Reads the manifest and checks the structure of a folder, but no digests of files.

    Raises:
        ConfigError: The folder is not a bundle, or its path is not UTF-8.
        BundleError: The folder contains a link or a special file, the manifest is invalid or names a file outside, or
            an ONNX file stores weights elsewhere.
    """
    atomic_dir.recover(folder)
    if not folder.is_dir():
        problem = "a file, not the folder of a bundle" if folder.is_file() else "the folder does not exist"
        raise ConfigError(problem, location=str(folder), hint="Give the folder of a bundle.")
    check_utf8(folder)
    if not (folder / MANIFEST).is_file():
        manifests = folder.glob(f"*/{MANIFEST}") if (folder / GENERATION).exists() else ()
        parts = sorted(path.parent.name for path in manifests)
        hint = f"This is the folder of a generative model. Name a part: {' or '.join(parts)}." if parts else None
        raise ConfigError("the folder is not a bundle (manifest.json is missing)", location=str(folder), hint=hint)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError(
                "a bundle may contain only regular files and folders, not links", location=str(path), hint=_LINK_HINT
            )
    manifest = read_manifest_only(folder)
    if not manifest.artifacts or set(manifest.parity.bounds) != {output.name for output in manifest.outputs}:
        message = "the manifest lists no artifact, or lacks the tolerance of an output"
        raise BundleError(message, location=str(folder / MANIFEST))
    listed = {record.path for record in manifest.files}
    for name in [*listed, *(artifact.path for artifact in manifest.artifacts)]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or name not in listed:
            raise BundleError(
                f"the manifest names {name!r}, which is not a file of the bundle", location=str(folder / MANIFEST)
            )
    for name in sorted(listed - {path for artifact in manifest.artifacts for path in artifact.paths}):
        # Such a file would be used without a check.
        if name.endswith(registry.list_suffixes()):
            raise BundleError("the manifest does not list this model file as an artifact", location=str(folder / name))
    for artifact in manifest.artifacts:
        if (folder / artifact.path).is_file():
            registry.get_format(artifact.format).check_file(folder / artifact.path)
    return manifest


def check_unchanged(folder: Path, manifest: Manifest, *, report: bool = True) -> None:
    """Checks that a folder contains exactly the files of its manifest, unchanged.

    Args:
        report: As in `read_manifest`.

    Raises:
        BundleError: A file is missing, added or changed.
    """
    measurements = digest_json.read(folder / MEASUREMENTS)
    if measurements.get("manifest") != manifest.digest:
        raise BundleError("the measurements belong to another bundle", location=str(folder / MEASUREMENTS))
    expected = {record.path: record for record in manifest.files}
    folders = {parent.as_posix() for name in expected for parent in PurePosixPath(name).parents}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in folders if path.is_dir() else name not in expected and name not in UNLISTED:
            kind = "folder" if path.is_dir() else "file"
            raise BundleError(f"the manifest does not list this {kind}", location=str(path), hint=f"Remove the {kind}.")
    for name, record in expected.items():
        check_file(folder / name, record)
    if report:
        _check_report(folder, measurements.get("report_sha256"))


def read_manifest_only(folder: Path) -> Manifest:
    """Reads the manifest without checking any other file.

    Raises:
        BundleError: The manifest is missing, was changed, or has another version or schema.
    """
    document = digest_json.read(folder / MANIFEST)
    if (version := document.get("manifest_version")) != VERSION:
        raise BundleError(
            f"the manifest has another version (expected {VERSION}, found {version})",
            location=str(folder / MANIFEST),
            hint="Upgrade optexport." if isinstance(version, int) and version > VERSION else "Export the bundle again.",
        )
    return digest_json.validated(Manifest, document, folder / MANIFEST)


def check_file(path: Path, record: FileRecord) -> None:
    """Checks a file against its record in the manifest.

    Raises:
        BundleError: The file is missing or was changed.
    """
    try:
        if not path.is_file():
            raise BundleError("the file is missing", location=str(path))
        if path.stat().st_size != record.size or sha256(path) != record.sha256:
            raise BundleError("the file was changed after the bundle was written", location=str(path))
    except OSError as error:
        raise unreadable(error, path) from error


def _check_report(folder: Path, digest: object) -> None:
    """Checks the report against its digest in the measurements.

    The digest is missing in older bundles. It is a list of two if a process was killed while it replaced the report.
    """
    path = folder / REPORT
    try:
        actual = sha256(path) if path.is_file() else None
    except OSError as error:
        raise unreadable(error, path) from error
    if actual not in (digest if isinstance(digest, list) else [digest]):
        unlisted = "the measurements do not list the report"
        changed = unlisted if digest is None else "the report was changed after it was written"
        raise BundleError(
            "the report is missing" if actual is None else changed,
            location=str(path),
            hint=f"Write the report again: optexport report {shlex.quote(str(folder))}",
        )
