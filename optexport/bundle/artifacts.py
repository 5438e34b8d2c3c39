"""Writes the files of a graph, each with its record in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.manifest import ArtifactRecord
from optexport.errors import ExportError, OptexportError, first_line
from optexport.exporters.registry import BUILT_IN, get_format

if TYPE_CHECKING:
    from optexport.exporters.flat_graph import FlatGraph

_REPAIR = "Repair or uninstall the package of the format."


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
    location = f"{type(chosen).__module__}:{type(chosen).__qualname__}.write"
    try:
        fixed_shape = chosen.write(graph, folder / chosen.file_name, passes)
    except Exception as error:  # code of other packages may raise anything
        if file_format in BUILT_IN or isinstance(error, OptexportError):
            raise
        message = f"the format {file_format} failed: {type(error).__name__}: {first_line(error)}"
        raise ExportError(message, location=location, hint=_REPAIR) from error
    if not (folder / chosen.file_name).is_file():
        raise ExportError(f"the format {file_format} wrote no file {chosen.file_name}", location=location, hint=_REPAIR)
    return ArtifactRecord(
        format=file_format, path=chosen.file_name, device=graph.device, fixed_shape=fixed_shape, passes=passes
    )
