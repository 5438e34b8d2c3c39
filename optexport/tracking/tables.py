"""Tables of changes, parity and latency for MLflow's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord
from optexport.tracking.bundle_record import BundleRecord

Table = Mapping[str, Sequence[Any]]


def tables(finished: BundleRecord) -> dict[str, Table]:
    """Returns tables with columns and rows by file name; an empty table is omitted."""
    found = {
        "transformed_nodes.json": _changes(finished.manifest),
        "parity.json": _parity(finished.manifest),
        "latency.json": _latency(finished.measured.bench),
    }
    return {name: {"columns": columns, "data": rows} for name, (columns, rows) in found.items() if rows}


def _changes(manifest: Manifest) -> tuple[list[str], list[list[Any]]]:
    return ["rule", "node", "target", "replaced", "formats"], [
        [t.rule, node, change.target, ", ".join(change.replaced), ", ".join(t.formats)]
        for t in manifest.transformations
        for change in t.changes
        for node in change.nodes or [""]  # a change that only removes nodes has none
    ]


def _parity(manifest: Manifest) -> tuple[list[str], list[list[Any]]]:
    bounds = manifest.parity.bounds
    return ["target", "output", "distance", "floor", "multiple", "limit", "step", "argmax_agreement", "worst_case"], [
        [
            target.title,
            output.output,
            output.max_abs,
            bounds[output.output].floor,
            output.multiple,
            bounds[output.output].limit,
            output.step,
            output.argmax_agreement,
            output.worst_case,
        ]
        for target in manifest.parity.targets
        for output in target.outputs
    ]


def _latency(bench: BenchRecord | None) -> tuple[list[str], list[list[Any]]]:
    columns = ["artifact", "shape", "p50_ms", "low_ms", "high_ms", "p90_ms", "p99_ms", "rows_per_second"]
    figures = [] if bench is None else bench.figures
    return columns, [[getattr(figure, column) for column in columns] for figure in figures]
