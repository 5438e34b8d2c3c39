"""Tables on a run's page. MLflow shows them next to those of other runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured
from optexport.bundle.parity_records import ParityRecord
from optexport.tracking.bundle_record import BundleRecord

# Artifact path of the tables in their run.
TABLES = "tables"

Columns = Sequence[str]
Rows = Sequence[Sequence[Any]]


def bundle_tables(bundle: BundleRecord) -> dict[str, bytes]:
    """Returns the tables of a bundle by file name; an empty table is omitted."""
    manifest, measured = bundle.manifest, bundle.measurements
    return _encode(
        {
            **_parity_tables(manifest.parity),
            "files.json": (["path", "bytes"], [[file.path, file.size] for file in manifest.files]),
            "transformations.json": _transformation_table(manifest),
            "transformed_nodes.json": _change_table(manifest),
            "precision.json": _precision_table(manifest),
            "seconds.json": (["step", "seconds"], list(measured.seconds.items())),
            **_speed_tables(measured),
        }
    )


def parity_tables(parity: ParityRecord) -> dict[str, bytes]:
    """Returns the tables of a parity check by file name; an empty table is omitted."""
    return _encode(_parity_tables(parity))


def _encode(tables: Mapping[str, tuple[Columns, Rows]]) -> dict[str, bytes]:
    """Returns the tables that have rows, as JSON. A browser cannot read NaN and infinity."""

    def cell(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {
        name: json.dumps({"columns": columns, "data": [[*map(cell, row)] for row in rows]}, indent=2).encode()
        for name, (columns, rows) in tables.items()
        if rows
    }


def _fields(records: Sequence[Any], names: Sequence[str]) -> Rows:
    return [[getattr(record, name) for name in names] for record in records]


def _parity_tables(parity: ParityRecord) -> dict[str, tuple[Columns, Rows]]:
    fields = ["floor_ratio", "step", "cosine", "argmax_agreement", "worst_case"]
    outputs = [(target, output) for target in parity.targets for output in target.outputs]
    gate_fields = ["measure", "output", "value", "min", "mean", "low", "high", "count", "ties", "failure"]
    return {
        "parity.json": (
            ["target", "output", "distance", "floor", "limit", "share_of_tolerance", *fields, "failure"],
            [
                [
                    target.title,
                    output.output,
                    output.max_abs,
                    parity.bounds[output.output].floor,
                    parity.bounds[output.output].limit,
                    output.used_share,
                    *(getattr(output, name) for name in fields),
                    next((case.failure for case in output.cases if case.failure is not None), None),
                ]
                for target, output in outputs
            ],
        ),
        "gates.json": (
            ["target", *gate_fields],
            [[target.title, *row] for target in parity.compared for row in _fields(target.gate_results, gate_fields)],
        ),
    }


def _transformation_table(manifest: Manifest) -> tuple[Columns, Rows]:
    return ["rule", "formats", "nodes_before", "nodes_after", "changes", "near_misses"], [
        [t.rule, ", ".join(t.formats), t.nodes_before, t.nodes_after, len(t.changes), len(t.near_misses)]
        for t in manifest.transformations
    ]


def _change_table(manifest: Manifest) -> tuple[Columns, Rows]:
    return ["rule", "node", "target", "replaced", "formats"], [
        [t.rule, node, change.target, ", ".join(change.replaced), ", ".join(t.formats)]
        for t in manifest.transformations
        for change in t.changes
        for node in change.nodes or [""]  # a change that only removes nodes has none
    ]


def _precision_table(manifest: Manifest) -> tuple[Columns, Rows]:
    return ["format", "precision", "layer", "kept_in_float32"], [
        [artifact.format, artifact.precision.precision, layer.layer, layer.kept]
        for artifact in manifest.artifacts
        if artifact.precision is not None
        for layer in artifact.precision.layers
    ]


def _speed_tables(measured: Measured) -> dict[str, tuple[Columns, Rows]]:
    gain = ["format", "ms", "original_ms", "speedup", "low", "high", "sizes", "threads"]
    figure = ["artifact", "shape", "p50_ms", "low_ms", "high_ms", "p90_ms", "p99_ms", "rows_per_second"]
    figure += ["load_seconds", "peak_memory_bytes"]
    comparison = ["artifact", "baseline", "shape", "speedup", "low", "high", "verdict"]
    bench, over = measured.bench, ["speedup", "low", "high", "verdict"]
    return {
        "gain.json": (gain, _fields(measured.gain, gain)),
        "latency.json": (figure, [] if bench is None else _fields(bench.figures, figure)),
        "speedups.json": (comparison, [] if bench is None else _fields(bench.comparisons, comparison)),
        "tuning.json": (
            ["format", "chosen", *over],
            [
                [outcome.format, outcome.chosen.change, *(getattr(outcome.over_plain, name, None) for name in over)]
                for outcome in measured.tune
            ],
        ),
    }
