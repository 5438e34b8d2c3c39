"""What is measured: exported files, each by itself or out of a bundle."""

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
    """One exported file.

    Attributes:
        name: What it is called in reports and errors.
        format: "onnx", "torchscript" or "pt2".
        size: Bytes, those of external data included.
        proven: Whether it is of a bundle, whose files were compared with the original model.
        inputs: The names of its inputs; None where only its runtime knows.
        fixed: Whether it takes no sizes but the traced ones.
        precision: What it was lowered to, where it was.
        device: Where it runs.
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
class Target:
    """What a path on the command line stands for.

    Attributes:
        bundle: The folder of the bundle that it is, or is in.
        manifest: That bundle's, after its files were checked against it.
    """

    artifacts: tuple[Artifact, ...]
    bundle: Path | None = None
    manifest: Manifest | None = None


def open_target(path: Path) -> Target:
    """Finds what is to be measured at a path: all files of a bundle, one of them, or a file of another's.

    Nothing in a bundle is loaded before its files were found to be those that were proven.

    Raises:
        ConfigError: It is neither a bundle nor a file of a known kind.
        BundleError: A file of the bundle is missing, added or changed.
        BenchError: An ONNX file cannot be read.
    """
    folder = path if path.is_dir() else bundle_of(path)
    if folder is not None:
        from optexport.bundle.digests import read_manifest

        manifest = read_manifest(folder)
        inputs = [spec.name for spec in manifest.inputs]
        artifacts = tuple(exported(manifest.artifacts, inputs, folder, f"{folder}: "))
        if not path.is_dir():
            artifacts = tuple(artifact for artifact in artifacts if artifact.path == path)
        if not artifacts:
            raise ConfigError("it is no exported model of the bundle that it is in", location=str(path))
        return Target(artifacts, folder, manifest)
    if path.suffix not in _FORMATS or (path.exists() and not path.is_file()):  # a pipe would be waited for
        raise ConfigError(
            "it is neither a bundle nor an exported file", location=str(path), hint=f"Known are {', '.join(_FORMATS)}."
        )
    file_format = _FORMATS[path.suffix]
    return Target((Artifact(str(path), path, file_format, file_size(path, file_format)),))


def exported(
    records: Sequence[ArtifactRecord], inputs: Sequence[str], folder: Path, name: str, *, proven: bool = True
) -> list[Artifact]:
    """The files of one export.

    Args:
        inputs: The names of the model's inputs.
        name: What comes before the format, and the precision that a file was lowered to, in their names.
    """
    return [
        Artifact(
            name=f"{name}{record.format}{f' ({record.precision.precision})' if record.precision else ''}",
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
    """Bytes of a model's file, with those of the files that an ONNX file keeps its weights in.

    Raises:
        BenchError: It cannot be read.
    """
    names = {path.name}
    if file_format == "onnx":
        names |= locations(read_onnx(path))
    try:
        return sum((path.parent / name).stat().st_size for name in names)
    except (OSError, ValueError) as error:  # the latter of names that no file has
        raise BenchError(f"it lacks its weights: {error}", location=str(path)) from error


def read_onnx(path: Path) -> Any:
    """Reads the structure of an ONNX file, without weights that are kept elsewhere.

    Raises:
        BenchError: It is none.
    """
    import onnx

    try:
        return onnx.load_model(path, load_external_data=False)
    except Exception as error:  # protobuf's errors share no base class with those of files
        raise BenchError(f"it is no ONNX file: {first_line(error)}", location=str(path)) from error


def bundle_of(path: Path) -> Path | None:
    """The bundle that a path lies in, as far as its manifest's first look tells; a layout is four folders deep."""
    for folder in path.parents[:4]:
        try:
            manifest = folder / MANIFEST
            if not manifest.is_file():  # a pipe would be waited for
                continue
            document = json.loads(manifest.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(document, dict) and "manifest_version" in document:
            return folder
    return None
