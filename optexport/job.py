"""The inputs of a run, with the config parsed and the model loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import fx

from optexport.bundle import layout
from optexport.bundle.manifest import ArtifactRecord
from optexport.bundle.measurements import Origin
from optexport.config.run_steps import group_formats
from optexport.config.schema import Config, Format
from optexport.errors import TraceError
from optexport.exporters.flat_graph import FlatGraph
from optexport.loading.loader import Loaded
from optexport.parity.gates import Metric
from optexport.signature.signature import Batch, Dim, Dynamic, Signature
from optexport.transformations.apply import Applied, NamedRule, Transformed


@dataclass(frozen=True)
class Variant:
    """The formats that share a graph, and the rules for this graph.

    Attributes:
        precision: The dtype that the graph is cast to after the rules; None if it is not cast.
    """

    formats: tuple[Format, ...]
    rules: tuple[NamedRule, ...]
    precision: str | None = None


@dataclass(frozen=True)
class VariantResult:
    """Result of one variant.

    Attributes:
        artifacts: The files, in the draft of the bundle.
    """

    variant: Variant
    transformed: Transformed
    artifacts: tuple[ArtifactRecord, ...]


@dataclass(frozen=True)
class Job:
    """All inputs of a run, with the config parsed and the model loaded.

    Attributes:
        example: The batch to trace with.
        user_batches: The user's batches to check.
        dump: A folder for the graph before and after every transformation.
        rows: How many rows the user's data have, if they were split into batches.
        metrics: The user's own metrics of gates, by name.
        final_output: The folder that users see, if the bundle is first written elsewhere. A failed check writes its
            folder next to it.
        is_dynamic_declared: Whether the user requested the sizes in ``dynamic``.
        origin: The origin of the bundle, such as its git commit.
        reuse_key: A digest of everything that the bundle depends on; None if no earlier bundle may be reused.
    """

    config: Config
    loaded: Loaded
    example: Batch
    user_batches: tuple[Batch, ...]
    dynamic: Dynamic | None
    rules: tuple[NamedRule, ...]
    output: Path
    config_text: str | None = None
    dump: Path | None = None
    rows: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    final_output: Path | None = None
    is_dynamic_declared: bool = True
    origin: Origin = field(default_factory=Origin)
    reuse_key: str | None = None

    def with_fixed_inputs(self, values: Mapping[str, torch.Tensor]) -> Job:
        """Fixes some inputs to values, and returns a job whose model no longer takes them.

        Raises:
            TraceError: The user's data have other values.
        """
        if not values:
            return self
        for name, value in values.items():
            if any(not torch.equal(batch[name], value) for batch in self.user_batches):
                raise TraceError(
                    "the model can only be traced for one value of this input, but the data have several",
                    location=f"inputs: {name}",
                    hint="Export the model once for each value.",
                )
        example, *user_batches = (
            {name: tensor for name, tensor in batch.items() if name not in values}
            for batch in (self.example, *self.user_batches)
        )
        loaded = self.loaded.with_constants(list(self.example), values)
        return replace(self, loaded=loaded, example=example, user_batches=tuple(user_batches))

    @property
    def failure(self) -> Path:
        """The folder that a failed parity check writes."""
        return layout.sibling(self.final_output or self.output, "failure")

    @property
    def variants(self) -> list[Variant]:
        """The variants: formats with the same rules share one graph."""
        groups = group_formats(self.config, [rule.formats for rule in self.rules])
        return [Variant(group.formats, tuple(self.rules[i] for i in group.rules), group.precision) for group in groups]

    def make_flat_graph(
        self, signature: Signature, graph_module: fx.GraphModule, applied: Sequence[Applied]
    ) -> FlatGraph:
        """Returns a graph with everything that the formats need to write it.

        Args:
            signature: The signature of the traced model.
            applied: The transformations that made the graph.
        """
        return FlatGraph(
            graph_module,
            signature,
            self.example,
            self.loaded.weights_sha256,
            applied,
            self.config.model.device,
            self.config.export.opset,
            self.config.export.onnx.providers,
        )

    def precision_of(self, file_format: Format) -> str | None:
        """Returns the lower precision of a format; None if it has the model's precision."""
        return None if self.config.precision is None else self.config.precision.of(file_format)

    @property
    def weight_bits(self) -> int:
        """Bits of the weights of an ONNX file in int8."""
        return 7 if self.config.precision is None else self.config.precision.weight_bits

    @property
    def has_declared_sizes(self) -> bool:
        """True if the user declared sizes, and tracing did not choose them."""
        dims = [dim for axes in (self.dynamic or {}).values() for dim in axes.values()]
        return self.is_dynamic_declared and any(isinstance(dim, Dim) for dim in dims)
