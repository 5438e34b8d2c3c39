"""Exported files that are kept, under a digest of the graph that they are made of and of how."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from optexport._utils import memory
from optexport.bundle.manifest import ArtifactRecord
from optexport.cache import keys, store
from optexport.config.schema import Format
from optexport.exporters.writer import Writer


def export(
    writer: Writer, file_format: Format, folder: Path, passes: Sequence[str], opset: int | None
) -> tuple[ArtifactRecord, bool]:
    """Writes a file, or takes the one that an earlier run wrote of the same graph; tells whether it did.

    Files of large models are not kept, and those of graphs that call what is not known by its name.

    Raises:
        ExportError: The graph cannot be written in that format.
    """
    entry = _name(writer, file_format, passes, opset)
    if entry is not None and (kept := store.read(entry)) is not None:
        place, (known, names) = kept
        if _copied(place, names, folder):
            return ArtifactRecord.model_validate_json(known), True
    record = writer.write(file_format, folder, passes, opset)
    if entry is not None:
        files = keys.files_of(folder / record.path)

        def fill(place: Path) -> None:
            for file in files:
                shutil.copyfile(file, place / file.name)

        notes = [record.model_dump_json(), [file.name for file in files]]
        store.write(entry, notes, size=sum(file.stat().st_size for file in files), fill=fill)
    return record, False


def _copied(place: Path, names: Sequence[str], folder: Path) -> bool:
    """Whether all files of an entry could be copied: another run may remove it at any moment, to make room."""
    try:
        for name in names:
            shutil.copyfile(place / name, folder / name)
    except FileNotFoundError:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return False
    return True


def of_graph(graph_module: fx.GraphModule) -> str | None:
    """A digest of a graph with its weights; None where nothing is kept of it."""
    return keys.of_graph(graph_module) if store.enabled() and not memory.is_large(graph_module) else None


def of_file(path: Path) -> str | None:
    """A digest of an exported file; None where nothing is kept."""
    return keys.of_file(path) if store.enabled() else None


def _name(writer: Writer, file_format: Format, passes: Sequence[str], opset: int | None) -> str | None:
    if (graph := of_graph(writer.flat)) is None:
        return None
    made_of = [keys.of_tensors([writer.example]), str(writer.signature), writer.metadata(passes)]
    return store.name("export", graph, file_format, writer.device, passes, opset, made_of)
