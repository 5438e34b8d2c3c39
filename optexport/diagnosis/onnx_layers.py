"""Comparison of the ONNX files of two bundles, layer by layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import onnx
import torch

from optexport.bundle.contents import read_traced_inputs
from optexport.bundle.layout import REFERENCE
from optexport.bundle.manifest import Manifest
from optexport.diagnosis.intermediates import open_all_values, sample_evenly
from optexport.errors import ConfigError
from optexport.signature.signature import Batch

# Elements of a value that are compared, and those that show which values belong together.
_SAMPLE = 4096
_PEEK = 256
# Values that differ by more, relative to the largest one, are not the same value of two files.
_FARTHEST = 0.1
# A run returns values of about this many bytes. Each run computes the whole file again.
_RETURNED_BYTES = 256 << 20
_FIRST_VALUES = 16


@dataclass(frozen=True)
class _Value:
    """A floating-point value of a file: a sample of its elements, and the weight that its node reads."""

    name: str
    operator: str
    weight: str
    shape: tuple[int, ...]
    elements: torch.Tensor


@dataclass(frozen=True)
class LayerComparison:
    """Result of comparing the values inside two ONNX files.

    Attributes:
        rows: The values that a layer with a weight computes, and the outputs: name in A, operator, weight, name in B,
            and difference relative to the largest value of A. Without a counterpart, the last two are None.
        matches: The number of all values of A with a counterpart in B.
        values: The number of all floating-point values of A.
    """

    rows: tuple[tuple[str, str, str, str | None, float | None], ...]
    matches: int
    values: int


def compare_layers(folder_a: Path, a: Manifest, folder_b: Path, b: Manifest) -> LayerComparison:
    """Compares the values inside the ONNX files of two bundles on the traced inputs of A, or of B if only these fit.

    Names of values change with the rules and format passes, so values belong together if each is the closest one to the
    other. Outputs belong together by name.

    Raises:
        ConfigError: A bundle has no ONNX file, or no traced inputs fit both files.
        BundleError: The stored inputs are damaged.
    """
    path_a, path_b = _find_onnx(folder_a, a), _find_onnx(folder_b, b)
    inputs_a, inputs_b = ({spec.name: (spec.dtype, len(spec.shape)) for spec in m.inputs} for m in (a, b))
    if inputs_a != inputs_b:
        raise ConfigError(
            f"the ONNX files take different inputs ({', '.join(inputs_a)} and {', '.join(inputs_b)})"
            if inputs_a.keys() != inputs_b.keys()
            else "the ONNX files take inputs of different dtypes or ranks",
            location="`layers`",
            hint="Compare bundles of models with the same inputs.",
        )
    batches = (read_traced_inputs(folder / REFERENCE, list(inputs_a)) for folder in (folder_a, folder_b))
    batch = next((batch for batch in batches if _fits(batch, a) and _fits(batch, b)), None)
    if batch is None:
        raise ConfigError(
            "the ONNX files take inputs of different sizes",
            location="`layers`",
            hint="Compare bundles with the same sizes, or with dynamic axes.",
        )
    values_a, values_b = (list(_read_values(path, batch)) for path in (path_a, path_b))
    outputs = {output.name for output in a.outputs} & {output.name for output in b.outputs}
    pairs = _match(values_a, values_b, outputs)
    rows = []
    for value in values_a:
        if value.weight or value.name in outputs:
            other = pairs.get(value.name)
            counterpart = (None, None) if other is None else (other.name, _difference(value, other))
            rows.append((value.name, value.operator, value.weight, *counterpart))
    return LayerComparison(tuple(rows), len(pairs), len(values_a))


def _fits(batch: Batch, manifest: Manifest) -> bool:
    """Returns True if a file takes inputs of these sizes."""
    return all(
        isinstance(size, str) or size == actual
        for spec in manifest.inputs
        for size, actual in zip(spec.shape, batch[spec.name].shape, strict=True)
    )


def _find_onnx(folder: Path, manifest: Manifest) -> Path:
    path = next((artifact.path for artifact in manifest.artifacts if artifact.format == "onnx"), None)
    if path is None:
        raise ConfigError(
            "the bundle has no ONNX file",
            location=f"`layers`: {folder}",
            hint='Add "onnx" to export.formats, or leave out `layers`.',
        )
    return folder / path


def _read_values(path: Path, batch: Batch) -> Iterator[_Value]:
    """Runs a file without optimizations and yields the floating-point values of its nodes, in order."""
    model = onnx.load(path, load_external_data=False)
    weights = {initializer.name for initializer in model.graph.initializer}
    inputs = {value.name: batch[value.name].contiguous().numpy() for value in model.graph.input}
    producers = {name: node for node in model.graph.node for name in node.output if name and node.op_type != "Constant"}
    remaining, count = list(producers), _FIRST_VALUES
    with open_all_values(path, model) as session:
        while remaining:
            names, remaining = remaining[:count], remaining[count:]
            results = session.run(names, inputs)
            size = sum(result.nbytes for result in results if hasattr(result, "nbytes"))
            count = max(1, count * _RETURNED_BYTES // max(size, 1)) if size > 0 else len(remaining)
            for name, result in zip(names, results, strict=True):
                if getattr(result, "dtype", None) is not None and result.dtype.kind == "f" and result.size > 1:
                    node = producers[name]
                    weight = next((read for read in node.input if read in weights), "")
                    elements = sample_evenly(torch.from_numpy(result), _SAMPLE).double()
                    yield _Value(name, node.op_type, weight, result.shape, elements)


def _match(values_a: Sequence[_Value], values_b: Sequence[_Value], outputs: Collection[str]) -> dict[str, _Value]:
    """Returns the counterpart in B of values of A: outputs by name, and other values that are closest to each other."""
    by_shape: dict[tuple[int, ...], list[_Value]] = {}
    for value in values_b:
        by_shape.setdefault(value.shape, []).append(value)
    pairs: dict[str, _Value] = {}
    for shape, group in groupby(sorted(values_a, key=lambda value: value.shape), key=lambda value: value.shape):
        mine, theirs = list(group), by_shape.get(shape, [])
        if not theirs:
            continue
        peeks_a, peeks_b = (torch.stack([sample_evenly(v.elements, _PEEK) for v in side]) for side in (mine, theirs))
        distances = torch.stack([(peeks_b - peek).abs().amax(1) for peek in peeks_a]).nan_to_num(nan=torch.inf)
        for row, value in enumerate(mine):
            column = int(distances[row].argmin())
            other = theirs[column]
            if distances[row, column] <= distances[:, column].min() and _difference(value, other) <= _FARTHEST:
                pairs[value.name] = other
    shapes = {value.name: value.shape for value in values_a}
    return pairs | {v.name: v for v in values_b if v.name in outputs and shapes.get(v.name) == v.shape}


def _difference(a: _Value, b: _Value) -> float:
    """Returns the largest difference of two values, relative to the largest finite magnitude of the first."""
    scale = float(a.elements[a.elements.isfinite()].abs().max()) if a.elements.isfinite().any() else 0.0
    largest = float(torch.where(a.elements == b.elements, 0.0, (a.elements - b.elements).abs()).max())
    return largest / scale if scale else largest
