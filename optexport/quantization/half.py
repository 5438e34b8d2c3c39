"""Casts a graph to half precision, except layers that the gates need in float32."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from optexport.bundle.manifest import PrecisionRecord
from optexport.job import Job, Variant
from optexport.parity.checker import ParityChecker
from optexport.parity.reference import Call, graph_runner
from optexport.quantization.sensitivity import choose_layers, resolve_keep_float32
from optexport.runtime.runners import Run
from optexport.transformations import CastPrecision
from optexport.transformations.apply import Applied, NamedRule, sharing_copy, transform
from optexport.transformations.cast_precision import layers_in_half


def cast_graph(
    graph_module: fx.GraphModule, variant: Variant, job: Job, call: Call, checker: ParityChecker
) -> tuple[fx.GraphModule, Applied, PrecisionRecord]:
    """Casts a copy of a graph to half precision, except layers that the gates need in float32.

    Args:
        graph_module: Graph to copy. It stays unchanged and shares its unconverted tensors.
        variant: Variant with the precision and formats.
        call: Runs a graph on a batch and names its outputs.
        checker: Checker with the reference and the gates.

    Returns:
        The copy, the applied rule and the record of the layer choice.

    Raises:
        ConfigError: No layer can be cast, or `precision.keep_float32` names an unknown layer.
        ParityError: No choice of layers passes the gates.
    """
    precision = variant.precision
    assert precision is not None

    def cast(keep: Collection[str]) -> tuple[fx.GraphModule, Applied]:
        (rule,) = NamedRule.of(CastPrecision(dtype=precision, keep=tuple(keep)))
        transformed = transform(sharing_copy(graph_module), [rule])
        return transformed.graph_module, transformed.applied[0]

    def make(keep: Collection[str]) -> Run:
        return graph_runner(cast(keep)[0], call)

    half_layers = layers_in_half(graph_module)
    layers = [layer for layer in layers_in_half(cast(())[0]) if layer not in half_layers]
    choice = choose_layers(
        ", ".join(variant.formats), precision, layers, resolve_keep_float32(job, graph_module, layers), make, checker
    )
    lowered, applied = cast(choice.float32_units)
    return lowered, applied, choice.record()
