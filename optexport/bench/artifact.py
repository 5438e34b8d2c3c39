"""Finds the exported files to measure, alone or within a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optexport.bundle.layout import MANIFEST
from optexport.bundle.manifest import ArtifactRecord, Manifest
from optexport.errors import ConfigError
from optexport.exporters.format import Benchmark, Loader
from optexport.exporters.registry import find_format_of_file, get_format, list_suffixes
from optexport.runtime.devices import Device


@dataclass(frozen=True)
class Artifact:
    """An exported file.

    Attributes:
        name: Name in reports and errors.
        path: The file.
        format: Name of the format.
        size: Bytes, including external data.
        proven: True if the file is part of a bundle, and was compared with the original.
        inputs: Names of its inputs; None if only the runtime knows them.
        outputs: Names of its outputs; None if only the runtime knows them.
        fixed: True if it accepts only the traced sizes.
        precision: Lower precision of the file, if any.
        device: Device to run on.
        prepare: For a model that runs in this process: reads inputs as `Format.prepare_benchmark`. None for a file.
    """

    name: str
    path: Path
    format: str
    size: int
    proven: bool = False
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    fixed: bool = False
    precision: str | None = None
    device: Device = "cpu"
    prepare: Callable[[Path], Loader] | None = None

    def benchmark(self, threads: int) -> Benchmark:
        """Returns what a worker runs."""
        return Benchmark(self.path, self.inputs, self.outputs, threads, self.device)


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
        inputs, outputs = ([spec.name for spec in specs] for specs in (manifest.inputs, manifest.outputs))
        artifacts = tuple(list_artifacts(manifest.artifacts, (inputs, outputs), folder, f"{folder}: "))
        if not path.is_dir():
            artifacts = tuple(artifact for artifact in artifacts if artifact.path == path)
        if not artifacts:
            raise ConfigError(f"{path.name} is not an exported model of the bundle {folder}", location=str(path))
        return ArtifactSet(artifacts, folder, manifest)
    file_format = find_format_of_file(path.name)
    if file_format is None or (path.exists() and not path.is_file()):  # opening a pipe would block
        raise ConfigError(
            "the path is neither a bundle nor an exported file",
            location=str(path),
            hint=f"Give a bundle, or a file that ends in {', '.join(list_suffixes())}.",
        )
    return ArtifactSet((Artifact(str(path), path, file_format, file_size(path, file_format)),))


def list_artifacts(
    records: Sequence[ArtifactRecord],
    names: tuple[Sequence[str], Sequence[str]],
    folder: Path,
    prefix: str,
    *,
    proven: bool = True,
) -> list[Artifact]:
    """Returns the files of an export as artifacts.

    Args:
        records: Their records in the manifest.
        names: Names of the model's inputs and of its outputs.
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
            inputs=tuple(names[0]),
            outputs=tuple(names[1]),
            fixed=record.fixed_shape is not None,
            precision=None if record.precision is None else record.precision.precision,
            device=record.device,
        )
        for record in records
    ]


def file_size(path: Path, file_format: str) -> int:
    """Returns the bytes of a model with all of its files.

    Raises:
        BenchError: A file cannot be read.
    """
    return get_format(file_format).find_size(path)


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
