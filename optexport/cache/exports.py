"""Cache of exported files. The key covers the graph and the options of the export."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from optexport._utils import model_memory
from optexport.bundle.artifacts import write_artifact
from optexport.bundle.manifest import ArtifactRecord
from optexport.cache import keys, store
from optexport.config.schema import Format
from optexport.exporters import registry
from optexport.exporters.flat_graph import FlatGraph


def export(graph: FlatGraph, file_format: Format, folder: Path, passes: Sequence[str]) -> tuple[ArtifactRecord, bool]:
    """Writes an exported file, or copies it from the cache.

    The cache skips large models, graphs with unknown functions, and formats of other packages, whose code may change.

    Returns:
        The record of the file, and True if it comes from the cache.

    Raises:
        ExportError: The graph cannot be written in this format.
    """
    entry = _find_key(graph, file_format, passes)
    if entry is not None and (cached := store.read(entry)) is not None:
        entry_folder, (record_json, names) = cached
        if _copy(entry_folder, names, folder):
            return ArtifactRecord.model_validate_json(record_json), True
    record = write_artifact(graph, file_format, folder, passes)
    if entry is not None:
        _store(entry, record, folder)
    return record, False


def store_file(graph: FlatGraph, record: ArtifactRecord, folder: Path, passes: Sequence[str]) -> None:
    """Stores a file that `write_artifact` wrote, so that `export` copies it."""
    if (entry := _find_key(graph, record.format, passes)) is not None:
        _store(entry, record, folder)


def can_store(graph: FlatGraph, file_format: Format) -> bool:
    """Returns True if `store_file` stores such a file."""
    return file_format in registry.BUILT_IN and of_graph(graph.flat) is not None


def _store(entry: str, record: ArtifactRecord, folder: Path) -> None:
    files = registry.get_format(record.format).existing_files(folder / record.path)

    def fill(entry_folder: Path) -> None:
        for file in files:
            shutil.copyfile(file, entry_folder / file.name)

    notes = [record.model_dump_json(), [file.name for file in files]]
    store.write(entry, notes, size=sum(file.stat().st_size for file in files), fill=fill)


def _copy(entry_folder: Path, names: Sequence[str], folder: Path) -> bool:
    """Copies the files of an entry; returns False if another run removes the entry meanwhile."""
    try:
        for name in names:
            shutil.copyfile(entry_folder / name, folder / name)
    except FileNotFoundError:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return False
    return True


def of_graph(graph_module: fx.GraphModule) -> str | None:
    """Returns a digest of a graph and its weights, or None if the cache does not apply."""
    return keys.of_graph(graph_module) if store.enabled() and not model_memory.is_large(graph_module) else None


def of_file(path: Path, file_format: str) -> str | None:
    """Returns a digest of an exported file, or None if the cache does not apply."""
    return keys.of_file(path, file_format) if store.enabled() and file_format in registry.BUILT_IN else None


def _find_key(graph: FlatGraph, file_format: Format, passes: Sequence[str]) -> str | None:
    if file_format not in registry.BUILT_IN or (digest := of_graph(graph.flat)) is None:
        return None
    inputs = [keys.of_tensors([graph.example]), str(graph.signature), graph.metadata(passes)]
    versions = registry.versions([file_format])
    parts = [digest, file_format, versions, graph.device, passes, graph.opset, inputs]
    # Torch computes no constants of ONNX files. A forked process also writes them, with one thread.
    return store.entry_key("export", *parts, depends_on_threads=file_format != "onnx")
