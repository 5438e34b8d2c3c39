"""Writes a graph in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from optexport.bundle.manifest import ArtifactRecord
from optexport.config import schema
from optexport.config.format_passes import list_passes
from optexport.exporters.format import FlatGraph, Format
from optexport.exporters.onnx.exporter import OnnxFormat
from optexport.exporters.pt2 import Pt2Format
from optexport.exporters.torchscript import TorchScriptFormat

FORMATS: Mapping[schema.Format, type[Format]] = {
    "onnx": OnnxFormat,
    "torchscript": TorchScriptFormat,
    "pt2": Pt2Format,
}


class GraphWriter(FlatGraph):
    """A flat graph that is written in any format. The formats share one exported program."""

    @cached_property
    def _formats(self) -> Mapping[schema.Format, Format]:
        return {name: make(self) for name, make in FORMATS.items()}

    def write(
        self, file_format: schema.Format, folder: Path, passes: Sequence[str], opset: int | None = None
    ) -> ArtifactRecord:
        """Writes a file.

        Args:
            passes: Names of format passes; names of other formats are ignored.
            opset: Opset of an ONNX file; the exporter chooses one by default.

        Raises:
            ExportError: The format does not support the graph.
        """
        chosen = self._formats[file_format]
        passes = [name for name in list_passes(file_format) if name in passes]  # in the order in which they are applied
        fixed_shape = chosen.save(folder / chosen.file_name, passes, opset)
        return ArtifactRecord(
            format=file_format, path=chosen.file_name, device=self.device, fixed_shape=fixed_shape, passes=passes
        )
