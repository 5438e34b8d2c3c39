"""Lowers a graph, or an ONNX file, to the precision that a config asks for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import fx

from optexport.bundle.manifest import PrecisionRecord
from optexport.errors import ParityError
from optexport.job import Job, Variant
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.record import parity_record
from optexport.parity.reference import Call, graph_runner
from optexport.quantization import int8
from optexport.quantization.sensitivity import choose, failures, gated_cases, layers_in, within
from optexport.runtime import runners
from optexport.runtime.runners import Run
from optexport.transformations import CastPrecision
from optexport.transformations.apply import Applied, NamedRule, sharing_copy, transform
from optexport.transformations.cast_precision import layer_name, layers_in_half
from optexport.transformations.merge_linears import parts_in_name


def cast_graph(
    graph_module: fx.GraphModule, branch: Variant, job: Job, call: Call, proof: ParityChecker
) -> tuple[fx.GraphModule, Applied, PrecisionRecord]:
    """A copy of a graph with its layers and products in half precision, but for those that the gates keep.

    Args:
        graph_module: Is not changed; its tensors are shared where they stay.

    Returns:
        The copy, what was done, and what was found on the way.

    Raises:
        ConfigError: There is nothing to cast, or `precision.keep_float32` names no layer.
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
    choice = choose(", ".join(branch.formats), precision, layers, _kept(job, graph_module, layers), make, proof)
    lowered, applied = cast(choice.kept)
    return lowered, applied, choice.record()


def quantize_file(
    source: Path, folder: Path, precision: str, job: Job, proof: ParityChecker, graph_module: fx.GraphModule
) -> PrecisionRecord:
    """Writes an ONNX file with its layers in int8, but for those that the gates keep.

    Args:
        source: The file in float32, which stays as it is; others are written beside it.
        folder: Where to write the file, under the same name.
        graph_module: What the file was made of.

    Returns:
        What was found on the way.

    Raises:
        ConfigError: There is nothing to quantise, or `precision.keep_float32` names no layer.
        ExportError: onnxruntime cannot quantise the file, or run what it made.
        ParityError: No choice of layers passes the gates.
    """
    prepared, attempt = source.with_name("prepared.onnx"), source.with_name("attempt.onnx")
    layers = int8.prepare(source, prepared, precision)
    batches = [case.batch for case in gated_cases(proof)]

    def write(keep: Collection[str], target: Path) -> None:
        kept = {layer for unit in keep for layer in layers_in(unit, layers)}
        nodes = [node for layer, found in layers.items() if layer not in kept for node in found]
        int8.quantize(prepared, target, nodes, precision, batches)

    def make(keep: Collection[str]) -> Run:
        write(keep, attempt)
        return runners.open_onnx(attempt, list(proof.bounds), optimised=True)

    choice = choose("onnx", precision, layers, _kept(job, graph_module, layers), make, proof)
    write(choice.kept, folder / source.name)
    return choice.record()


def check_passed(target: TargetParity, proof: ParityChecker) -> None:
    """Refuses a place of lower precision that does not pass on all cases; others have their own way to fail.

    Raises:
        ParityError: It does not.
    """
    if target.precision is not None and not target.passed:
        told = "".join(f"\n  {failure}" for failure in failures(target))
        raise ParityError(
            f"in {target.precision} it fails a gate that it passed when the layers were chosen{told}",
            location=target.target,
            hint="Name more layers in precision.keep_float32, or leave its format out of [precision].",
            proof=parity_record(proof),
        )


def _kept(job: Job, graph_module: fx.GraphModule, layers: Collection[str]) -> Collection[str]:
    """What the config keeps of a file's layers.

    Where several files are lowered, a name may be of what only another has as a layer: an embedding, say, which is in
    float32 in an ONNX file whatever happens.
    """
    precision = job.config.precision
    assert precision is not None
    keep = [found for name in precision.keep_float32 for found in _here(name, layers)]
    if sum(precision.of(name) is not None for name in job.config.export.formats) < 2:
        return keep
    known = {name for name, _ in (*job.loaded.model.named_modules(), *graph_module.named_modules())}
    known |= {layer_name(node) for node in graph_module.graph.nodes if node.op == "call_function"}
    elsewhere = [
        name
        for name in keep
        if any(within(one, [name]) for one in known) and not any(within(layer, [name]) for layer in layers)
    ]
    return [name for name in keep if name not in elsewhere]


def _here(name: str, layers: Collection[str]) -> list[str]:
    """What a name stands for among a file's layers: itself, or what it was merged into, or the parts of it.

    Whether layers are merged may differ from file to file, and with `[tune]` it is measured.
    """
    if any(within(layer, [name]) for layer in layers):
        return [name]
    whole = [layer for layer in layers if name in parts_in_name(layer)]
    return whole or [part for part in parts_in_name(name) if part in layers] or [name]
