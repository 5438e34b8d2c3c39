"""How two bundles differ: first whether in what they compute, then in what they were made of, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport.bundle.digests import read_manifest
from optexport.bundle.manifest import ChangeRecord, Manifest, TensorRecord
from optexport.bundle.measurements import FigureRecord, Measured, read_measured
from optexport.errors import on_one_line
from optexport.report.html import originals
from optexport.report.html.contents import named

Cell = str | int | float | None
Verdict = Literal["same", "same to rounding", "different", "not known"]
_MOST_NAMES = 3
_ABSENT = "not there"


@dataclass(frozen=True)
class Side:
    """One of the two bundles."""

    folder: Path
    manifest: Manifest
    measured: Measured

    @property
    def title(self) -> str:
        """The model and the folder."""
        return f"{named(self.manifest)} ({self.folder.name})"


@dataclass(frozen=True)
class Section:
    """One kind of difference: a table, of which only the rows that differ are there unless the title says otherwise.

    Attributes:
        same: How many rows are left out since they are equal.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    same: int = 0
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """All that tells two bundles apart.

    Attributes:
        computes: Whether both compute the same: to the byte of their files, to the rounding that each is proven to, or
            not; it is not known of other graphs that share no inputs.
        told: That as a sentence.
        reasons: What it follows from.
    """

    one: Side
    other: Side
    computes: Verdict
    told: str
    reasons: tuple[str, ...]
    sections: tuple[Section, ...]


def read_side(folder: Path) -> Side:
    """Reads a bundle to compare.

    Raises:
        ConfigError: The folder is no bundle.
        BundleError: It is damaged.
    """
    return Side(folder, read_manifest(folder), read_measured(folder))


def compare(one: Side, other: Side) -> Difference:
    """Compares two bundles."""
    computes, told, reasons = _verdict(one, other)
    a, b = one.manifest, other.manifest
    sections = (
        _pairs("Model", _model(a), _model(b)),
        _pairs("Inputs, outputs and sizes", _signature(a), _signature(b)),
        _pairs("Config", dict(_flat(a.config)), dict(_flat(b.config))),
        _pairs("Versions", a.versions, b.versions),
        _rules(a, b),
        _pairs("Graphs and files", _made(one), _made(other)),
        _parity(a, b),
        _sizes(a, b),
        _latency(one, other),
    )
    return Difference(one, other, computes, told, reasons, sections)


def _verdict(one: Side, other: Side) -> tuple[Verdict, str, tuple[str, ...]]:
    a, b = one.manifest, other.manifest
    differ = {
        "the weights": a.model.weights_sha256 != b.model.weights_sha256,
        "the model's class": a.model.class_name != b.model.class_name,
        "the inputs": _unsized(a.inputs) != _unsized(b.inputs),
        "the outputs": _unsized(a.outputs) != _unsized(b.outputs),
        "the constants": a.constants != b.constants,
        "rules that do not preserve the computation": _not_preserving(a) != _not_preserving(b),
        "the precision of a file": _precisions(a) != _precisions(b),
    }
    if reasons := tuple(what for what, differs in differ.items() if differs):
        return "different", f"They do not compute the same: {', '.join(reasons)} differ.", reasons
    files, others = ({x.format: _digest(m, x.path) for x in m.artifacts} for m in (a, b))
    common = files.keys() & others.keys()
    unequal = sorted(name for name in common if files[name] != others[name])
    if common and not unequal:
        only = sorted(files.keys() ^ others.keys())
        which = f"the files that both have are ({', '.join(only)} is in one alone)" if only else "all model files are"
        return "same", f"They compute the same: {which} equal to the byte.", ()
    # Of equal weights a model's code, and its config, may make something else.
    results = originals.compare(one.folder, a, other.folder, b)
    if results.apart is not None:
        return "different", f"They do not compute the same: {results.apart}.", ("the originals' results",)
    if not results.shared and _traced_graph(a) != _traced_graph(b):
        told = "It is not known whether they compute the same: their traced graphs differ, and they share no inputs."
        return "not known", told, ("the traced graphs",)
    reasons = tuple(f"{name} differs" for name in unequal) or ("they have no format in common",)
    original = (
        f"originals that gave the same on {results.shared} inputs that are not extreme"
        if results.shared
        else "the same traced graph"
    )
    told = f"They compute the same to rounding: both are proven against {original}; {', '.join(reasons)}."
    return "same to rounding", told, reasons


def _traced_graph(manifest: Manifest) -> str | None:
    return next((file.sha256 for file in manifest.files if file.path == "graph_before.txt"), None)


def _unsized(records: Sequence[TensorRecord]) -> list[tuple[str, str, int]]:
    """Names, types and ranks, which must be equal of what computes the same; sizes may be dynamic in one alone."""
    return [(record.name, record.dtype, len(record.shape)) for record in records]


def _not_preserving(manifest: Manifest) -> list[tuple[str, list[str], list[ChangeRecord]]]:
    rules = [rule for rule in manifest.transformations if not rule.preserves_computation and rule.changes]
    return [(rule.signature, rule.formats, rule.changes) for rule in rules]


def _precisions(manifest: Manifest) -> set[tuple[str, str, frozenset[str]]]:
    """What is lowered in which file: other layers give other numbers, beyond rounding."""
    return {
        (a.format, a.precision.precision, frozenset(layer.layer for layer in a.precision.layers if layer.kept is None))
        for a in manifest.artifacts
        if a.precision is not None
    }


def _digest(manifest: Manifest, path: str) -> tuple[str, ...]:
    """The digests of a model file, and of the weights beside it."""
    return tuple(file.sha256 for file in manifest.files if file.path in (path, f"{path}.data"))


def _pairs(title: str, one: Mapping[str, Cell], other: Mapping[str, Cell]) -> Section:
    names = dict.fromkeys([*one, *other])
    rows = [(name, one.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names]
    return Section(title, ("", "A", "B"), *_unequal(rows))


def _unequal(rows: Sequence[tuple[str, Cell, Cell]]) -> tuple[tuple[tuple[Cell, ...], ...], int]:
    unequal = tuple(row for row in rows if row[1] != row[2])
    return unequal, len(rows) - len(unequal)


def _model(manifest: Manifest) -> dict[str, Cell]:
    model = manifest.model
    return {
        "source": model.source,
        "revision": model.revision,
        "class": model.class_name,
        "SHA-256 of the weights": model.weights_sha256,
    }


def _signature(manifest: Manifest) -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    for title, records in (("input", manifest.inputs), ("output", manifest.outputs)):
        found |= {f"{title} {r.name}": f"[{', '.join(map(str, r.shape))}] {r.dtype}" for r in records}
    found |= {f"constant {name}": str(value) for name, value in manifest.constants.items()}
    sizes = manifest.dims.items()
    return found | {f"size {name}": f"{d.min} to {'any' if d.max is None else d.max}" for name, d in sizes}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A document as dotted keys with values; what is empty holds none."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for target, each in enumerate(value):
            yield from _flat(each, f"{prefix}[{target}]")
    elif value != []:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rules(a: Manifest, b: Manifest) -> Section:
    rows: list[tuple[Cell, ...]] = []
    one, other = _changes(a), _changes(b)
    same = 0
    for rule in dict.fromkeys([*one, *other]):
        ours, theirs = one.get(rule), other.get(rule)
        if ours == theirs:
            same += 1
            continue
        only = [_where(change) for change in (ours or {}) if change not in (theirs or {})]
        only_there = [_where(change) for change in (theirs or {}) if change not in (ours or {})]
        counts = [_ABSENT if changes is None else len(changes) for changes in (ours, theirs)]
        rows.append((rule, *counts, _few(only), _few(only_there)))
    return Section("Rules", ("rule", "changes in A", "changes in B", "only in A", "only in B"), tuple(rows), same)


def _changes(manifest: Manifest) -> dict[str, dict[tuple[tuple[str, ...], str, tuple[str, ...]], None]]:
    found: dict[str, dict[tuple[tuple[str, ...], str, tuple[str, ...]], None]] = {}
    for rule in manifest.transformations:
        title = f"{rule.rule} ({', '.join(rule.formats)})" if rule.formats else rule.rule
        changes = found.setdefault(title, {})
        for change in rule.changes:
            changes[tuple(change.nodes), change.target, tuple(change.replaced)] = None
    return found


def _where(change: tuple[tuple[str, ...], str, tuple[str, ...]]) -> str:
    nodes, target, replaced = change
    return ", ".join(nodes or replaced) or target


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{'; '.join(names[:_MOST_NAMES])}{more}"


def _made(side: Side) -> dict[str, Cell]:
    manifest = side.manifest
    found: dict[str, Cell] = {
        "traced graph, nodes": manifest.nodes_before,
        "exported graph, nodes": manifest.nodes_after,
    }
    graphs = {file.path: file.sha256 for file in manifest.files if file.path.startswith("graph_")}
    found |= {path: digest[:12] for path, digest in graphs.items()}
    for artifact in manifest.artifacts:
        found[artifact.path] = "; ".join(digest[:12] for digest in _digest(manifest, artifact.path))
        found[f"{artifact.path}, device"] = artifact.device
        found[f"{artifact.path}, passes"] = ", ".join(artifact.passes) or "none"
        precision = artifact.precision
        found[f"{artifact.path}, precision"] = "the model's" if precision is None else precision.precision
        found[f"{artifact.path}, fixed shape"] = artifact.fixed_shape or "no"
    return found


def _parity(a: Manifest, b: Manifest) -> Section:
    one, other = (
        {(target.title, output.output): output.max_abs for target in m.parity.targets for output in target.outputs}
        for m in (a, b)
    )
    rows = []
    for target, output in dict.fromkeys([*one, *other]):
        limits = [None if (bound := m.parity.bounds.get(output)) is None else bound.limit for m in (a, b)]
        distances = [found.get((target, output), _ABSENT) for found in (one, other)]
        rows.append((target, output, distances[0], limits[0], distances[1], limits[1]))
    columns = ("place", "output", "distance in A", "limit in A", "distance in B", "limit in B")
    kept = tuple(row for row in rows if row[2:4] != row[4:6])
    return Section("Parity", columns, kept, len(rows) - len(kept))


def _sizes(a: Manifest, b: Manifest) -> Section:
    one, other = ({file.path: file.size for file in m.files} for m in (a, b))
    rows: list[tuple[Cell, ...]] = []
    for path in dict.fromkeys([*one, *other]):
        ours, theirs = one.get(path), other.get(path)
        if ours != theirs:
            ratio = theirs / ours if ours and theirs is not None else None
            rows.append((path, _ABSENT if ours is None else ours, _ABSENT if theirs is None else theirs, ratio))
    same = len({*one, *other}) - len(rows)
    return Section("Sizes", ("file", "bytes in A", "bytes in B", "B over A"), tuple(rows), same)


def _latency(one: Side, other: Side) -> Section:
    """All files of the bundles that were measured at one shape in both: whether their intervals overlap."""
    found = []
    for ours, theirs in product(_figures(one), _figures(other)):
        if (ours.artifact, ours.shape) == (theirs.artifact, theirs.shape):
            found.append((ours.artifact, ours.shape, *_times(ours), *_times(theirs), _overlap(ours, theirs)))
    note = "Of each run by itself: bench A --against B lets the files take turns, which tells smaller differences."
    machines = {(side.measured.processor, side.measured.cpus, side.measured.device) for side in (one, other)}
    threads = {side.measured.bench.threads for side in (one, other) if side.measured.bench is not None}
    if len(machines) > 1 or len(threads) > 1:
        note = f"Measured on other processors, devices or numbers of threads, which no comparison survives. {note}"
    columns = ("file", "shape", "ms in A", "95 % interval in A", "ms in B", "95 % interval in B", "intervals")
    return Section("Latency", columns, tuple(found), note=note if found else "Not measured in both.")


def _figures(side: Side) -> list[FigureRecord]:
    if side.measured.bench is None:
        return []
    own = {artifact.name for artifact in side.measured.bench.artifacts if artifact.proven}
    return [figure for figure in side.measured.bench.figures if figure.artifact in own]


def _times(figure: FigureRecord) -> tuple[float, str | None]:
    if figure.low_ms is None or figure.high_ms is None:
        return figure.p50_ms, None
    return figure.p50_ms, f"{figure.low_ms:.3g} to {figure.high_ms:.3g}"


def _overlap(ours: FigureRecord, theirs: FigureRecord) -> str:
    low, high = (ours.low_ms, theirs.low_ms), (ours.high_ms, theirs.high_ms)
    lows, highs = [x for x in low if x is not None], [x for x in high if x is not None]
    if len(lows) < 2 or len(highs) < 2:
        return "not known"
    if max(lows) <= min(highs):
        return "overlap: cannot tell"
    return "apart: A is faster" if highs[0] < lows[1] else "apart: B is faster"


def shown(cell: Cell) -> str:
    """A cell for people."""
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, float):
        return f"{cell:.3g}" if math.isfinite(cell) else str(cell)
    return f"{cell:,}" if isinstance(cell, int) else cell


def as_json(difference: Difference) -> dict[str, Any]:
    """The difference for machines."""
    return {
        "a": str(difference.one.folder),
        "b": str(difference.other.folder),
        "computes": difference.computes,
        "told": difference.told,
        "reasons": list(difference.reasons),
        "sections": {
            section.title: {
                "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows],
                "equal": section.same,
            }
            for section in difference.sections
        },
    }


def show(difference: Difference, console: Console) -> None:
    """Prints the difference."""
    for letter, side in (("A", difference.one), ("B", difference.other)):
        console.print(f"[bold]{letter}[/] {escape(on_one_line(str(side.folder)))}", soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(on_one_line(difference.told))}[/]", soft_wrap=True, highlight=False)
    for section in difference.sections:
        if not section.rows:
            continue
        console.print(f"\n[bold]{section.title}[/] {_equal(section)}".rstrip(), highlight=False)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, cells in zip(section.columns, zip(*section.rows, strict=True), strict=True):
            number = all(isinstance(cell, int | float | None) for cell in cells)
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in section.rows:
            table.add_row(*(escape(on_one_line(shown(cell))) for cell in row))
        console.print(table)
        if section.note:
            console.print(section.note, soft_wrap=True, highlight=False)
    equal = [section.title for section in difference.sections if not section.rows and section.same]
    if equal:
        console.print(f"\n[bold]Equal[/] {', '.join(equal)}", soft_wrap=True, highlight=False)


def _equal(section: Section) -> str:
    return f"({section.same:,} more {'is' if section.same == 1 else 'are'} equal)" if section.same else ""
