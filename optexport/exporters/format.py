"""Interface of a format, and the graph that formats write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import fx
from torch.export import ExportedProgram

from optexport._version import __version__
from optexport.exporters import graph_export
from optexport.runtime import placement
from optexport.runtime.devices import Device
from optexport.signature.signature import Batch, Signature
from optexport.tracing.shapes.path_probe import drop_needless_assertions
from optexport.transformations.apply import Applied


class FlatGraph:
    """A graph with a flat tuple of outputs, and everything else that a format needs.

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
        self.flat = graph_export.flatten(graph_module, signature)

    @cached_property
    def program(self) -> ExportedProgram:
        """Graph exported again for ``.pt2`` and TorchScript.

        ONNX needs a separate export under patches.

        Raises:
            ExportError: ``torch.export`` refuses the graph.
        """
        program = graph_export.to_program(self.flat, self.signature, self.example)
        drop_needless_assertions(program, self.flat, self.signature, self.example)
        return program if self.device == "cpu" else placement.move_program(program, self.device)

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


class Format(ABC):
    """Writes one graph to files of one format.

    A new format is a module with a subclass, and an entry in `optexport.exporters.graph_writer.FORMATS`.

    Attributes:
        file_name: Name of the file in a bundle.
    """

    file_name: ClassVar[str]

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph

    @abstractmethod
    def save(self, path: Path, passes: Sequence[str], opset: int | None) -> str | None:
        """Writes a file.

        Args:
            passes: Names of the format passes to apply.
            opset: Opset of an ONNX file; other formats ignore it.

        Returns:
            None, or the reason why the file accepts only the shapes of the example.

        Raises:
            ExportError: The format does not support the graph.
        """
