"""Casts a graph to half precision, except layers that the gates need in float32."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from optexport.cache import keys
from optexport.job import Job
from optexport.parity.checker import ParityChecker
from optexport.parity.reference import Call, graph_runner
from optexport.quantization.sensitivity import Choice, LayerChoices, resolve_keep_float32
from optexport.runtime.runners import Run
from optexport.transformations import CastPrecision
from optexport.transformations.apply import Applied, NamedRule, sharing_copy, transform
from optexport.transformations.cast_precision import layers_in_half


class HalfCaster:
    """Casts copies of a graph to half precision.

    Args:
        graph_module: Graph to copy. It stays unchanged and shares its unconverted tensors.
        precision: "float16" or "bfloat16".

    Attributes:
        layers: Names of the layers that can be cast, in model order.
    """

    def __init__(self, graph_module: fx.GraphModule, precision: str) -> None:
        self._graph_module, self._precision = graph_module, precision
        half_layers = layers_in_half(graph_module)
        self.layers = [layer for layer in layers_in_half(self.cast(())[0]) if layer not in half_layers]

    def cast(self, float32_layers: Collection[str]) -> tuple[fx.GraphModule, Applied]:
        """Returns a copy with all other layers in half precision, and the applied rule."""
        (rule,) = NamedRule.of(CastPrecision(dtype=self._precision, keep=tuple(float32_layers)))
        transformed = transform(sharing_copy(self._graph_module), [rule])
        return transformed.graph_module, transformed.applied[0]

    def choose_layers(self, target: str, job: Job, call: Call, checker: ParityChecker, choices: LayerChoices) -> Choice:
        """Finds the layers that the gates need in float32.

        Args:
            target: Name of the files or the graph, for messages.
            call: Runs a graph on a batch and names its outputs.
            checker: Checker with the reference and the gates.
            choices: Choices of the run so far.

        Raises:
            ConfigError: No layer can be cast, or `precision.keep_float32` names an unknown layer.
            ParityError: No choice of layers passes the gates.
        """

        def make(keep: Collection[str]) -> list[Run]:
            return [graph_runner(self.cast(keep)[0], call)]

        keep = resolve_keep_float32(job, self._graph_module, self.layers)
        content = keys.of_graph(self._graph_module)
        return choices.choose(content, target, self._precision, self.layers, keep, make, checker)
