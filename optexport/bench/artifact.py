"""Finds the exported files to measure, alone or within a bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.bundle.external_data import locations
from optexport.bundle.layout import MANIFEST
from optexport.bundle.manifest import ArtifactRecord, Manifest
from optexport.errors import BenchError, ConfigError, first_line
from optexport.runtime.devices import Device

_FORMATS = {".onnx": "onnx", ".pt": "torchscript", ".pt2": "pt2"}


@dataclass(frozen=True)
class Artifact:
    """An exported file.

    Attributes:
        name: Name in reports and errors.
        path: The file.
        format: "onnx", "torchscript" or "pt2".
        size: Bytes, including external data.
        proven: True if the file is part of a bundle, and was compared with the original.
        inputs: Names of its inputs; None if only the runtime knows them.
        fixed: True if it accepts only the traced sizes.
        precision: Lower precision of the file, if any.
        device: Device to run on.
    """

    name: str
    path: Path
    format: str
    size: int
    proven: bool = False
    inputs: tuple[str, ...] | None = None
    fixed: bool = False
    precision: str | None = None
    device: Device = "cpu"


@dataclass(frozen=True)
class ArtifactSet:
    """The artifacts at a path of the command line.

    Attributes:
        artifacts: The artifacts.
        bundle: The bundle that the path is or is in.
        manifest: The manifest of that bundle, whose files were checked against it.
    """

    artifacts: tuple[Artifact, ...]
    bundle: Path | None = None
    manifest: Manifest | None = None


def open_artifacts(path: Path) -> ArtifactSet:
    """Returns the artifacts at a path: a bundle, a file of a bundle, or any other file.

    The files of a bundle are checked against its manifest before anything is loaded.

    Raises:
        ConfigError: The path is neither a bundle nor a file of a known format.
        BundleError: A file of the bundle is missing, added or changed.
        BenchError: An ONNX file cannot be read.
    """
    folder = path if path.is_dir() else find_bundle(path)
    if folder is not None:
        from optexport.bundle.digests import read_manifest

        manifest = read_manifest(folder)
        inputs = [spec.name for spec in manifest.inputs]
        artifacts = tuple(list_artifacts(manifest.artifacts, inputs, folder, f"{folder}: "))
        if not path.is_dir():
            artifacts = tuple(artifact for artifact in artifacts if artifact.path == path)
        if not artifacts:
            raise ConfigError(f"{path.name} is not an exported model of the bundle {folder}", location=str(path))
        return ArtifactSet(artifacts, folder, manifest)
    if path.suffix not in _FORMATS or (path.exists() and not path.is_file()):  # opening a pipe would block
        raise ConfigError(
            "the path is neither a bundle nor an exported file",
            location=str(path),
            hint=f"Give a bundle, or a file that ends in {', '.join(_FORMATS)}.",
        )
    file_format = _FORMATS[path.suffix]
    return ArtifactSet((Artifact(str(path), path, file_format, file_size(path, file_format)),))


def list_artifacts(
    records: Sequence[ArtifactRecord], inputs: Sequence[str], folder: Path, prefix: str, *, proven: bool = True
) -> list[Artifact]:
    """Returns the files of an export as artifacts.

    Args:
        records: Their records in the manifest.
        inputs: Names of the model's inputs.
        folder: Folder of the files.
        prefix: Prefix of the artifacts' names; the format and a lower precision follow.
        proven: True if the files were compared with the original.
    """
    return [
        Artifact(
            name=f"{prefix}{record.format}{f' ({record.precision.precision})' if record.precision else ''}",
            path=folder / record.path,
            format=record.format,
            size=file_size(folder / record.path, record.format),
            proven=proven,
            inputs=tuple(inputs),
            fixed=record.fixed_shape is not None,
            precision=None if record.precision is None else record.precision.precision,
            device=record.device,
        )
        for record in records
    ]


def file_size(path: Path, file_format: str) -> int:
    """Returns the bytes of a model file, including external data of ONNX.

    Raises:
        BenchError: A file cannot be read.
    """
    names = {path.name}
    if file_format == "onnx":
        names |= locations(read_onnx(path))
    try:
        return sum((path.parent / name).stat().st_size for name in names)
    except (OSError, ValueError) as error:  # ValueError for a name with a null character
        raise BenchError(f"the external data of the file is missing: {error}", location=str(path)) from error


def read_onnx(path: Path) -> Any:
    """Reads an ONNX file without its external data.

    Raises:
        BenchError: The file is not a valid ONNX file.
    """
    import onnx

    try:
        return onnx.load_model(path, load_external_data=False)
    except Exception as error:  # protobuf's errors and OSError have no common base class
        raise BenchError(f"the file is not a valid ONNX file: {first_line(error)}", location=str(path)) from error


def find_bundle(path: Path) -> Path | None:
    """Returns the bundle that contains a path, at most four folders up, or None."""
    for folder in path.parents[:4]:
        try:
            manifest = folder / MANIFEST
            if not manifest.is_file():  # opening a pipe would block
                continue
            document = json.loads(manifest.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(document, dict) and "manifest_version" in document:
            return folder
    return None
