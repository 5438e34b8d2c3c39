"""Casts a graph to half precision, except layers that the gates need in float32."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from optexport.bundle.manifest import PrecisionRecord
from optexport.job import Job, Variant
from optexport.parity.checker import ParityChecker
from optexport.parity.reference import Call, graph_runner
from optexport.quantization.sensitivity import choose, layers_to_keep
from optexport.runtime.runners import Run
from optexport.transformations import CastPrecision
from optexport.transformations.apply import Applied, NamedRule, sharing_copy, transform
from optexport.transformations.cast_precision import layers_in_half


def cast_graph(
    graph_module: fx.GraphModule, branch: Variant, job: Job, call: Call, proof: ParityChecker
) -> tuple[fx.GraphModule, Applied, PrecisionRecord]:
    """Casts a copy of a graph to half precision, except layers that the gates need in float32.

    Args:
        graph_module: Graph to copy. It stays unchanged and shares its unconverted tensors.
        branch: Variant with the precision and formats.
        call: Runs a graph on a batch and names its outputs.
        proof: Checker with the reference and the gates.

    Returns:
        The copy, the applied rule and the record of the layer choice.

    Raises:
        ConfigError: No layer can be cast, or `precision.keep_float32` names an unknown layer.
        ParityError: No choice of layers passes the gates.
    """
    precision = branch.precision
    assert precision is not None

    def cast(keep: Collection[str]) -> tuple[fx.GraphModule, Applied]:
        (rule,) = NamedRule.of(CastPrecision(dtype=precision, keep=tuple(keep)))
        done = transform(sharing_copy(graph_module), [rule])
        return done.graph_module, done.applied[0]

    def make(keep: Collection[str]) -> Run:
        return graph_runner(cast(keep)[0], call)

    own = layers_in_half(graph_module)
    layers = [layer for layer in layers_in_half(cast(())[0]) if layer not in own]
    choice = choose(
        ", ".join(branch.formats), precision, layers, layers_to_keep(job, graph_module, layers), make, proof
    )
    lowered, applied = cast(choice.kept)
    return lowered, applied, choice.record()
