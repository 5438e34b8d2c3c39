"""Writes the files of a graph, each with its record in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.manifest import ArtifactRecord
from optexport.exporters.registry import get_format

if TYPE_CHECKING:
    from optexport.exporters.flat_graph import FlatGraph


def write_artifact(graph: FlatGraph, file_format: str, folder: Path, passes: Sequence[str]) -> ArtifactRecord:
    """Writes a file.

    Args:
        passes: Names of format passes; names of other formats are ignored.

    Raises:
        ConfigError: A package of the format is not installed.
        ExportError: The format does not support the graph.
    """
    chosen = get_format(file_format)
    chosen.check_installed("export.formats")
    passes = [name for name in chosen.list_passes() if name in passes]  # in the order in which they are applied
    fixed_shape = chosen.write(graph, folder / chosen.file_name, passes)
    return ArtifactRecord(
        format=file_format, path=chosen.file_name, device=graph.device, fixed_shape=fixed_shape, passes=passes
    )
