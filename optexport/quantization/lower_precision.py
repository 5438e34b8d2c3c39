"""Conversion of a graph or ONNX file to the lower precision that a config requests."""

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
    choice = choose(", ".join(branch.formats), precision, layers, _kept(job, graph_module, layers), make, proof)
    lowered, applied = cast(choice.kept)
    return lowered, applied, choice.record()


def quantize_file(
    source: Path, folder: Path, precision: str, job: Job, proof: ParityChecker, graph_module: fx.GraphModule
) -> PrecisionRecord:
    """Writes an ONNX file in int8, except layers that the gates need in float32.

    Args:
        source: ONNX file in float32, unchanged. Temporary files are written to the same folder.
        folder: Folder for the new file, which has the same name.
        precision: Precision, one of `int8.OPERATORS`.
        proof: Checker with the reference and the gates.
        graph_module: Graph that the file was exported from.

    Returns:
        The record of the layer choice.

    Raises:
        ConfigError: No layer can be quantised, or `precision.keep_float32` names an unknown layer.
        ExportError: onnxruntime cannot quantise the file, or cannot run the result.
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
        return runners.open_onnx(attempt, list(proof.bounds), optimized=True)

    choice = choose("onnx", precision, layers, _kept(job, graph_module, layers), make, proof)
    write(choice.kept, folder / source.name)
    return choice.record()


def check_passed(target: TargetParity, proof: ParityChecker) -> None:
    """Rejects a target of lower precision that fails on all cases together.

    Other targets pass here, because they have their own error.

    Raises:
        ParityError: The target failed.
    """
    if target.precision is not None and not target.passed:
        told = "".join(f"\n  {failure}" for failure in failures(target))
        raise ParityError(
            f"in {target.precision} it fails a gate that it passed when the layers were chosen{told}",
            location=target.target,
            hint="Name more layers in precision.keep_float32, or leave its format out of [precision].",
            parity=parity_record(proof),
        )


def _kept(job: Job, graph_module: fx.GraphModule, layers: Collection[str]) -> Collection[str]:
    """Returns the configured float32 layers that exist in a file.

    If several files are lowered, a name may belong to layers of another file only. An embedding, for example, always
    stays in float32 in an ONNX file.
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
    """Resolves a layer name to itself, the layer it is merged into, or its parts.

    Merging of layers may differ between files, and `[tune]` decides it by measurement.
    """
    if any(within(layer, [name]) for layer in layers):
        return [name]
    whole = [layer for layer in layers if name in parts_in_name(layer)]
    return whole or [part for part in parts_in_name(name) if part in layers] or [name]
