"""Plots of parity and latency for MLflow's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord
from optexport.tracking.bundle_record import BundleRecord

# More bars are unreadable; the tables list all rows.
_MOST_ROWS = 40


def figures(finished: BundleRecord) -> dict[str, Any]:
    """Returns Matplotlib figures by file name; a figure without data is omitted."""
    found = {
        "parity.png": _parity(finished.manifest),
        "latency.png": _latency(finished.measured.bench),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _parity(manifest: Manifest) -> Any:
    """Plots distances as multiples of the noise floor, for outputs that have one."""
    rows = [
        (f"{target.title}: {output.output}", output.multiple)
        for target in manifest.parity.targets
        for output in target.outputs
        if output.multiple
    ][:_MOST_ROWS]
    if not rows:
        return None
    figure, axes = _drawn([name for name, _ in rows], "distance from float64, as a multiple of the original's own")
    axes.barh(range(len(rows)), [multiple for _, multiple in rows], color="tab:blue")
    axes.axvline(1.0, color="grey", linewidth=1)
    return figure


def _latency(bench: BenchRecord | None) -> Any:
    if bench is None or not bench.figures:
        return None
    rows = bench.figures[:_MOST_ROWS]
    figure, axes = _drawn([f"{row.artifact} at {row.shape}" for row in rows], "ms of a call: p50, 95 % interval")
    for target, row in enumerate(rows):
        if row.low_ms is not None and row.high_ms is not None:
            axes.plot([row.low_ms, row.high_ms], [target, target], color="tab:blue", linewidth=4)
        axes.plot([row.p50_ms], [target], "o", color="black", markersize=3)
    axes.set_xlim(left=0)
    return figure


def _drawn(names: Sequence[str], label: str) -> tuple[Any, Any]:
    """Creates a figure with one row per name, first name at the top."""
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(8, 1 + 0.25 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)  # a dollar sign in a name is not math
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=8)
    return figure, axes
