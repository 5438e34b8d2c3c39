"""The graph that formats write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from optexport._version import __version__
from optexport.exporters import graph_export
from optexport.runtime import placement
from optexport.runtime.devices import Device
from optexport.runtime.providers import PROVIDERS_KEY
from optexport.signature.signature import Batch, Signature
from optexport.tracing.shapes.path_probe import drop_needless_assertions
from optexport.transformations.apply import Applied


class FlatGraph:
    """A graph with a flat tuple of outputs, and everything else that a format needs.

    Attributes:
        flat: The graph: tensors in, by the names of the signature, and a tuple of tensors out. It is on the CPU.
        signature: Names, dtypes and shapes of the inputs and outputs, and the dynamic axes.
        example: Inputs at the traced sizes, on the CPU.
        device: Device that runs the files.
        opset: Opset of an ONNX file; None if the exporter chooses it.

    Args:
        providers: Execution providers of ONNX Runtime that will run an ONNX file, which records them.
        weights_sha256: Digest of the model's weights, written into ONNX files.
        applied: Transformations that were applied to the graph, written into ONNX files.
    """

    def __init__(  # noqa: PLR0913 - all that a format may need
        self,
        graph_module: fx.GraphModule,
        signature: Signature,
        example: Batch,
        weights_sha256: str,
        applied: Sequence[Applied],
        device: Device = "cpu",
        opset: int | None = None,
        providers: Sequence[str] = (),
    ) -> None:
        self.signature, self.example, self.device, self.opset = signature, example, device, opset
        self._weights_sha256, self._applied, self._providers = weights_sha256, applied, providers
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
        providers = {PROVIDERS_KEY: [*self._providers]} if self._providers else {}
        return {
            "optexport.version": __version__,
            "optexport.weights_sha256": self._weights_sha256,
            "optexport.transformations": [
                {"rule": a.rule.name, "options": dict(a.rule.options), "changes": len(a.report.changes)}
                for a in self._applied
            ],
            "optexport.passes": list(passes),
            **providers,
        }
