"""Compares two bundles: what they compute, their configs, graphs, files and times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from optexport.bundle.digests import read_manifest
from optexport.bundle.manifest import ArtifactRecord, ChangeRecord, Manifest, TensorRecord
from optexport.bundle.measurements import FigureRecord, read_measured
from optexport.bundle.parity_records import OutputRecord, ParityRecord, TargetRecord
from optexport.report import reference_comparison
from optexport.report.difference import Cell, Difference, Section, Side, Verdict
from optexport.report.parity_text import list_gate_results, list_outputs, metric_title, tolerance_text

_ChangeKey = tuple[tuple[str, ...], str, tuple[str, ...]]
_MAX_NAMES = 3
_ABSENT = "not there"


def read_side(folder: Path) -> Side:
    """Reads a bundle to compare.

    Raises:
        ConfigError: The folder is not a bundle.
        BundleError: The bundle is damaged.
    """
    return Side(folder, read_manifest(folder), read_measured(folder))


def compare(side_a: Side, side_b: Side) -> Difference:
    """Compares two bundles."""
    computes, sentence, reasons = _verdict(side_a, side_b)
    a, b = side_a.manifest, side_b.manifest
    sections = (
        _pairs("Model", _model(a), _model(b)),
        _pairs("Inputs, outputs and sizes", _signature(a), _signature(b)),
        _pairs("Config", dict(_flatten(a.config)), dict(_flatten(b.config))),
        _pairs("Versions", a.versions, b.versions),
        _rules(a, b),
        _pairs("Graphs and files", _files(a), _files(b)),
        _parity(a, b),
        _gates(a, b),
        _sizes(a, b),
        _latency(side_a, side_b),
    )
    return Difference(side_a, side_b, computes, sentence, reasons, sections)


def with_layers(difference: Difference, rows: Sequence[tuple[Cell, ...]], matches: int, values: int) -> Difference:
    """Adds a table of the values inside both ONNX files.

    Args:
        rows: For each layer, its name in A, operator, weight, name in B, and relative difference.
        matches: The number of all values of A with a counterpart in B.
        values: The number of all floating-point values of A.
    """
    columns = ("value in A", "operator", "weight", "value in B", "difference")
    note = (
        f"{matches} of {values} floating-point values of A have a counterpart in B. The table shows those of layers"
        " with weights, and the outputs. A difference is relative to the largest value."
    )
    unequal = tuple(row for row in rows if row[-1] != 0)  # also those without a counterpart
    section = Section("Layers", columns, unequal, len(rows) - len(unequal), note)
    return replace(difference, sections=(*difference.sections, section))


_CLASS, _PRECISION = _SINGULAR = ("the model's class", "the precision of a file")


def _verdict(side_a: Side, side_b: Side) -> tuple[Verdict, str, tuple[str, ...]]:
    a, b = side_a.manifest, side_b.manifest
    digests_a, digests_b = ({x.format: _digests(m, x) for x in m.artifacts} for m in (a, b))
    common = digests_a.keys() & digests_b.keys()
    unequal = sorted(name for name in common if digests_a[name] != digests_b[name])
    reasons = _certain_differences(a, b)
    if common and not unequal:  # a class may have been renamed
        reasons = tuple(reason for reason in reasons if reason != _CLASS)
    if reasons:
        verb = "differs" if len(reasons) == 1 and reasons[0] in _SINGULAR else "differ"
        return "different", f"They do not compute the same: {', '.join(reasons)} {verb}.", reasons
    if common and not unequal:
        only_one = sorted(digests_a.keys() ^ digests_b.keys())
        if not only_one:
            return "same", "They compute the same: all model files are equal to the byte.", ()
        shared, single = ", ".join(sorted(common)), ", ".join(only_one)
        return "same", f"They compute the same: equal to the byte in {shared}. Only one of them has {single}.", ()
    # Models with equal weights may still differ in code or config.
    results = reference_comparison.compare(side_a.folder, a, side_b.folder, b)
    if results.difference is not None:
        return "different", f"They do not compute the same: {results.difference}.", ("the originals' results",)
    if not results.shared and _traced_graph(a) != _traced_graph(b):
        sentence = "Unknown whether they compute the same: their traced graphs differ, and they share no inputs."
        return "not known", sentence, ("the traced graphs",)
    reasons = tuple(f"{name} differs" for name in unequal) or ("they have no format in common",)
    original = f"originals that agree on {results.shared} shared inputs" if results.shared else "the same traced graph"
    sentence = f"They compute the same, to rounding: both are verified against {original}; {', '.join(reasons)}."
    return "same to rounding", sentence, reasons


def _certain_differences(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """Returns what differs of the things that must be equal if both compute the same."""
    unequal = {
        "the weights": a.model.weights_sha256 != b.model.weights_sha256,
        _CLASS: a.model.class_name != b.model.class_name,
        "the inputs": _without_sizes(a.inputs) != _without_sizes(b.inputs),
        "the outputs": _without_sizes(a.outputs) != _without_sizes(b.outputs),
        "the constants": a.constants != b.constants,
        "rules that do not preserve the computation": _not_preserving(a) != _not_preserving(b),
        _PRECISION: _lowered_layers(a) != _lowered_layers(b),
    }
    return tuple(name for name, differs in unequal.items() if differs)


def _traced_graph(manifest: Manifest) -> str | None:
    return next((file.sha256 for file in manifest.files if file.path == "graph_before.txt"), None)


def _without_sizes(records: Sequence[TensorRecord]) -> list[tuple[str, str, int]]:
    """Returns names, dtypes and ranks; an axis may be dynamic in only one bundle."""
    return [(record.name, record.dtype, len(record.shape)) for record in records]


def _not_preserving(manifest: Manifest) -> list[tuple[str, list[str], list[ChangeRecord]]]:
    rules = [rule for rule in manifest.transformations if not rule.preserves_computation and rule.changes]
    return [(rule.signature, rule.formats, rule.changes) for rule in rules]


def _lowered_layers(manifest: Manifest) -> set[tuple[str, str, frozenset[str]]]:
    return {
        (a.format, a.precision.precision, frozenset(layer.layer for layer in a.precision.layers if layer.kept is None))
        for a in manifest.artifacts
        if a.precision is not None
    }


def _digests(manifest: Manifest, artifact: ArtifactRecord) -> tuple[str, ...]:
    """Returns the digests of all files of a model."""
    return tuple(file.sha256 for file in manifest.files if file.path in artifact.paths)


def _pairs(title: str, cells_a: Mapping[str, Cell], cells_b: Mapping[str, Cell]) -> Section:
    names = dict.fromkeys([*cells_a, *cells_b])
    rows = [(name, cells_a.get(name, _ABSENT), cells_b.get(name, _ABSENT)) for name in names]
    unequal = tuple(row for row in rows if row[1] != row[2])
    return Section(title, ("", "A", "B"), unequal, len(rows) - len(unequal))


def _model(manifest: Manifest) -> dict[str, Cell]:
    model = manifest.model
    return {
        "source": model.source,
        "revision": model.revision,
        "class": model.class_name,
        "SHA-256 of the weights": model.weights_sha256,
    }


def _signature(manifest: Manifest) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for title, records in (("input", manifest.inputs), ("output", manifest.outputs)):
        cells |= {f"{title} {r.name}": f"[{', '.join(map(str, r.shape))}] {r.dtype}" for r in records}
    cells |= {f"constant {name}": str(value) for name, value in manifest.constants.items()}
    sizes = manifest.dims.items()
    return cells | {f"size {name}": dim.describe() for name, dim in sizes}


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the values of a document with dotted keys; empty lists and tables are omitted."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flatten(child, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        for index, child in enumerate(value):
            yield from _flatten(child, f"{prefix}[{index}]")
    elif value != []:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rules(a: Manifest, b: Manifest) -> Section:
    rows: list[tuple[Cell, ...]] = []
    changes_a, changes_b = _changes(a), _changes(b)
    same = 0
    for rule in dict.fromkeys([*changes_a, *changes_b]):
        in_a, in_b = changes_a.get(rule), changes_b.get(rule)
        if in_a == in_b:
            same += 1
            continue
        only_a = [_change_name(change) for change in (in_a or {}) if change not in (in_b or {})]
        only_b = [_change_name(change) for change in (in_b or {}) if change not in (in_a or {})]
        counts = [_ABSENT if changes is None else len(changes) for changes in (in_a, in_b)]
        rows.append((rule, *counts, _join(only_a), _join(only_b)))
    return Section("Rules", ("rule", "changes in A", "changes in B", "only in A", "only in B"), tuple(rows), same)


def _changes(manifest: Manifest) -> dict[str, dict[_ChangeKey, None]]:
    """Returns the changes of each rule, in order."""
    by_rule: dict[str, dict[_ChangeKey, None]] = {}
    for rule in manifest.transformations:
        title = f"{rule.rule} ({', '.join(rule.formats)})" if rule.formats else rule.rule
        changes = by_rule.setdefault(title, {})
        for change in rule.changes:
            changes[tuple(change.nodes), change.target, tuple(change.replaced)] = None
    return by_rule


def _change_name(change: _ChangeKey) -> str:
    nodes, target, replaced = change
    return ", ".join(nodes or replaced) or target


def _join(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{'; '.join(names[:_MAX_NAMES])}{rest}"


def _files(manifest: Manifest) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        "traced graph, nodes": manifest.nodes_before,
        "exported graph, nodes": manifest.nodes_after,
    }
    graphs = {file.path: file.sha256 for file in manifest.files if file.path.startswith("graph_")}
    cells |= {path: digest[:12] for path, digest in graphs.items()}
    for artifact in manifest.artifacts:
        cells[artifact.path] = "; ".join(digest[:12] for digest in _digests(manifest, artifact))
        cells[f"{artifact.path}, device"] = artifact.device
        cells[f"{artifact.path}, format passes"] = ", ".join(artifact.passes) or "none"
        precision = artifact.precision
        cells[f"{artifact.path}, precision"] = "the model's" if precision is None else precision.precision
        cells[f"{artifact.path}, fixed shape"] = artifact.fixed_shape or "no"
    return cells


def _parity(a: Manifest, b: Manifest) -> Section:
    cells_a, cells_b = (
        {
            (target.title, output.output): (output.max_abs, _tolerance(m.parity, target, output))
            for target, output in list_outputs(m.parity)
        }
        for m in (a, b)
    )
    names, absent = dict.fromkeys([*cells_a, *cells_b]), (_ABSENT, None)
    rows = [(*name, *cells_a.get(name, absent), *cells_b.get(name, absent)) for name in names]
    columns = ("target", "output", "distance in A", "limit in A", "distance in B", "limit in B")
    unequal = tuple(row for row in rows if row[2:4] != row[4:6])
    return Section("Parity", columns, unequal, len(rows) - len(unequal))


def _tolerance(parity: ParityRecord, target: TargetRecord, output: OutputRecord) -> Cell:
    """Returns the tolerance of an output, or what decides if no case has one."""
    if output.cases and all(case.limit is None for case in output.cases):
        return tolerance_text(target, output, output.cases[0])
    bound = parity.bounds.get(output.output)
    return None if bound is None else bound.limit


def _gates(a: Manifest, b: Manifest) -> Section:
    gates_a, gates_b = (
        {
            (target.title, metric_title(result)): (result.value, result.min)
            for target, result in list_gate_results(m.parity)
        }
        for m in (a, b)
    )
    rows: list[tuple[Cell, ...]] = []
    for name in dict.fromkeys([*gates_a, *gates_b]):
        (value_a, min_a), (value_b, min_b) = (gates.get(name, (_ABSENT, None)) for gates in (gates_a, gates_b))
        minima = list(dict.fromkeys(minimum for minimum in (min_a, min_b) if minimum is not None))
        minimum = minima[0] if len(minima) == 1 else f"{minima[0]:.15g} in A, {minima[1]:.15g} in B"
        rows.append((*name, value_a, value_b, minimum))
    columns = ("target", "metric", "value in A", "value in B", "minimum")
    note = "Equal values are listed too." if rows else "Neither bundle has gates."
    return Section("Gates", columns, tuple(rows), note=note, digits=6)


def _sizes(a: Manifest, b: Manifest) -> Section:
    sizes_a, sizes_b = ({file.path: file.size for file in m.files} for m in (a, b))
    rows: list[tuple[Cell, ...]] = []
    for path in dict.fromkeys([*sizes_a, *sizes_b]):
        in_a, in_b = sizes_a.get(path), sizes_b.get(path)
        if in_a != in_b:
            ratio = in_b / in_a if in_a and in_b is not None else None
            rows.append((path, _ABSENT if in_a is None else in_a, _ABSENT if in_b is None else in_b, ratio))
    same = len({*sizes_a, *sizes_b}) - len(rows)
    return Section("Sizes", ("file", "bytes in A", "bytes in B", "B over A"), tuple(rows), same)


def _latency(side_a: Side, side_b: Side) -> Section:
    """Compares the latencies of files that both bundles measured at the same shape."""
    rows = [
        (a.artifact, a.shape, *_times(a), *_times(b), _overlap(a, b))
        for a, b in product(_figures(side_a), _figures(side_b))
        if (a.artifact, a.shape) == (b.artifact, b.shape)
    ]
    note = "Measured in separate runs. For a sharper comparison in turns: optexport bench A --against B."
    machines = {(side.measured.processor, side.measured.cpus, side.measured.device) for side in (side_a, side_b)}
    threads = {side.measured.bench.threads for side in (side_a, side_b) if side.measured.bench is not None}
    if len(machines) > 1 or len(threads) > 1:
        note = f"Not comparable: measured on different processors, devices or numbers of threads. {note}"
    columns = ("file", "shape", "ms in A", "95 % interval in A", "ms in B", "95 % interval in B", "intervals")
    return Section("Latency", columns, tuple(rows), note=note if rows else "Not measured in both bundles.")


def _figures(side: Side) -> list[FigureRecord]:
    """Returns the measurements of a bundle's own files, without the plain export."""
    if side.measured.bench is None:
        return []
    names = {artifact.name for artifact in side.measured.bench.artifacts if artifact.proven}
    return [figure for figure in side.measured.bench.figures if figure.artifact in names]


def _times(figure: FigureRecord) -> tuple[float, str | None]:
    if figure.low_ms is None or figure.high_ms is None:
        return figure.p50_ms, None
    return figure.p50_ms, f"{figure.low_ms:.3g} to {figure.high_ms:.3g}"


def _overlap(a: FigureRecord, b: FigureRecord) -> str:
    if a.low_ms is None or b.low_ms is None or a.high_ms is None or b.high_ms is None:
        return "not known"
    if max(a.low_ms, b.low_ms) <= min(a.high_ms, b.high_ms):
        return "overlap: inconclusive"
    return "apart: A is faster" if a.high_ms < b.low_ms else "apart: B is faster"
