"""Writes the files of one graph and shares the intermediate results between formats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import onnx_ir
from torch import fx
from torch.export import ExportedProgram

from optexport._version import __version__
from optexport.bundle.manifest import ArtifactRecord
from optexport.config.format_passes import of_format
from optexport.config.schema import Format
from optexport.exporters import exported_program
from optexport.exporters.onnx import exporter as onnx_exporter
from optexport.exporters.onnx import passes as onnx_passes
from optexport.exporters.torchscript import exporter as torchscript_exporter
from optexport.runtime import placement
from optexport.runtime.devices import Device
from optexport.signature.signature import Batch, Signature
from optexport.tracing.shapes.path_probe import drop_needless_assertions
from optexport.transformations.apply import Applied

_FILES = {"onnx": "model.onnx", "torchscript": "model.torchscript.pt", "pt2": "model.pt2"}


class Writer:
    """Writes a graph in any format.

    Args:
        example: Inputs at the traced sizes, on the CPU.
        weights_sha256: Digest of the model's weights, written into ONNX files.
        applied: Transformations that were applied to the graph, written into ONNX files.
        device: Device that runs the files. The graph itself is on the CPU.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        signature: Signature,
        example: Batch,
        weights_sha256: str,
        applied: Sequence[Applied],
        device: Device = "cpu",
    ) -> None:
        self.signature, self.example, self.device = signature, example, device
        self._weights_sha256, self._applied = weights_sha256, applied
        self.flat = exported_program.flatten(graph_module, signature)
        self._onnx_model = cache(self._convert)

    @cached_property
    def program(self) -> ExportedProgram:
        """Graph exported again for ``.pt2`` and TorchScript.

        ONNX needs a separate export under patches.

        Raises:
            ExportError: ``torch.export`` refuses the graph.
        """
        program = exported_program.to_program(self.flat, self.signature, self.example)
        drop_needless_assertions(program, self.flat, self.signature, self.example)
        return program if self.device == "cpu" else placement.program_to(program, self.device)

    def write(
        self, file_format: Format, folder: Path, passes: Sequence[str], opset: int | None = None
    ) -> ArtifactRecord:
        """Writes a file.

        Args:
            opset: Opset of an ONNX file; the exporter chooses one by default.

        Raises:
            ExportError: The format does not support the graph.
        """
        path, fixed_shape = folder / _FILES[file_format], None
        passes = [name for name in of_format(file_format) if name in passes]  # in the order in which they are applied
        if file_format == "pt2":
            exported_program.save(self.program, path, passes=passes)
        elif file_format == "torchscript":
            example = {name: tensor.to(self.device) for name, tensor in self.example.items()}
            fixed_shape = torchscript_exporter.save(self.program, self.signature, example, path, passes=passes)
        else:
            model = self._onnx_model(onnx_passes.opset(passes, opset))
            onnx_exporter.write(model, path, metadata=self.metadata(passes), passes=passes)
        return ArtifactRecord(
            format=file_format, path=path.name, device=self.device, fixed_shape=fixed_shape, passes=passes
        )

    def metadata(self, passes: Sequence[str]) -> dict[str, Any]:
        """Returns the ``metadata_props`` of an ONNX file, which record how it was written."""
        return {
            "optexport.version": __version__,
            "optexport.weights_sha256": self._weights_sha256,
            "optexport.transformations": [
                {"rule": a.rule.name, "options": dict(a.rule.options), "changes": len(a.report.changes)}
                for a in self._applied
            ],
            "optexport.passes": list(passes),
        }

    def _convert(self, opset: int | None) -> onnx_ir.Model:
        return onnx_exporter.convert(self.flat, self.signature, self.example, opset)
