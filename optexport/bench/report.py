"""The results of a benchmark, as tables and as a JSON document."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport._utils import notebook
from optexport._utils.markup import size_in_words
from optexport.bench.artifact import Artifact
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Comparison

# Columns that a terminal with fewer columns than this does not show.
_WIDE, _LESS_IMPORTANT = 100, ("p90 ms", "load s", "memory")
_COLOURS = {"faster": "green", "slower": "red", "inconclusive": None}


@dataclass(frozen=True)
class Figures:
    """Figures of an artifact on one workload; times are in seconds, memory is in bytes.

    Attributes:
        low: Lower end of the 95 % interval of the median turn; None with too few rounds.
        high: Upper end.
        load: Seconds to load the file.
    """

    artifact: Artifact
    workload: Workload
    p50: float
    p90: float
    p99: float
    low: float | None
    high: float | None
    rows_per_second: float
    load: float
    peak_memory: int | None


@dataclass(frozen=True)
class PairwiseComparison:
    """Comparison of an artifact with its baseline on one workload."""

    artifact: Artifact
    baseline: Artifact
    workload: Workload
    comparison: Comparison


@dataclass(frozen=True, repr=False)
class Report:
    """Results of a benchmark.

    Attributes:
        notes: Assumptions about the inputs, and what was not measured.
    """

    settings: Settings
    figures: tuple[Figures, ...]
    comparisons: tuple[PairwiseComparison, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        verdicts = Counter(pair.comparison.verdict for pair in self.comparisons)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "no comparisons"
        names = dict.fromkeys(figures.artifact.name for figures in self.figures)
        return f"Report({', '.join(names)}; {counts})"

    def summary(self) -> str:
        """Returns the tables that ``optexport bench`` prints."""
        return notebook.as_text(functools.partial(show, self))

    def _repr_html_(self) -> str:
        return notebook.as_html(functools.partial(show, self))


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as a document. Names of times end in their unit; sizes are in bytes."""
    artifacts = {figures.artifact: None for figures in report.figures}
    return {
        "threads": report.settings.threads,
        "rounds": report.settings.rounds,
        "artifacts": [
            {"name": a.name, "format": a.format, "device": a.device, "bytes": a.size, "proven": a.proven}
            for a in artifacts
        ],
        "figures": [_row(figures) for figures in report.figures],
        "comparisons": [
            {
                "artifact": pair.artifact.name,
                "baseline": pair.baseline.name,
                "format": pair.artifact.format,
                "shape": pair.workload.label,
                "speedup": pair.comparison.speedup,
                "low": pair.comparison.low,
                "high": pair.comparison.high,
                "verdict": pair.comparison.verdict,
                "more_rounds": pair.comparison.more_rounds,
            }
            for pair in report.comparisons
        ],
        "notes": list(report.notes),
    }


def _row(figures: Figures) -> dict[str, Any]:
    return {
        "artifact": figures.artifact.name,
        "format": figures.artifact.format,
        "shape": figures.workload.label,
        "sizes": dict(figures.workload.sizes),
        "rows": figures.workload.rows,
        "p50_ms": 1e3 * figures.p50,
        "p90_ms": 1e3 * figures.p90,
        "p99_ms": 1e3 * figures.p99,
        "low_ms": None if figures.low is None else 1e3 * figures.low,
        "high_ms": None if figures.high is None else 1e3 * figures.high,
        "rows_per_second": figures.rows_per_second,
        "load_seconds": figures.load,
        "peak_memory_bytes": figures.peak_memory,
    }


def show(report: Report, console: Console) -> None:
    """Prints the figures, comparisons and notes."""
    is_narrow = console.width < _WIDE
    console.print(figures_table(report, is_narrow=is_narrow))
    if is_narrow:
        console.print(f"A terminal of {_WIDE} columns also shows {', '.join(_LESS_IMPORTANT)}.", highlight=False)
    if report.comparisons:
        console.print(comparison_table(report))
    unproven = sorted({f.artifact.name for f in report.figures if not f.artifact.proven})
    for note in report.notes:
        console.print(escape(note), soft_wrap=True, highlight=False)
    if unproven:
        console.print(
            f"Not part of a bundle, so never compared with a model: {escape(', '.join(unproven))}",
            soft_wrap=True,
            highlight=False,
        )


def figures_table(report: Report, *, is_narrow: bool = False) -> Table:
    """Returns a table with a row for every artifact and shape; a narrow one has fewer columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ["p50 ms", "p90 ms", "p99 ms", "rows/s", "load s", "memory", "file"]
    shown = [heading for heading in headings if not (is_narrow and heading in _LESS_IMPORTANT)]
    for heading in ("artifact", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for f in report.figures:
        times = [f"{1e3 * seconds:.3g}" for seconds in (f.p50, f.p90, f.p99)]
        memory = "?" if f.peak_memory is None else size_in_words(f.peak_memory)
        texts = [*times, f"{f.rows_per_second:.4g}", f"{f.load:.2g}", memory, size_in_words(f.artifact.size)]
        cells = dict(zip(headings, texts, strict=True))
        table.add_row(escape(f.artifact.name), _shape(f.workload), *(cells[heading] for heading in shown))
    return table


def _shape(workload: Workload) -> str:
    return escape(workload.label.replace(",", ", "))  # lines break between sizes, not within one


def comparison_table(report: Report) -> Table:
    """Returns a table with a row for every pair and shape."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("artifact", "baseline", "shape"):
        table.add_column(heading, overflow="fold")
    table.add_column("speedup (95 % interval)", no_wrap=True)
    table.add_column("verdict")
    for pair in report.comparisons:
        c = pair.comparison
        table.add_row(
            escape(pair.artifact.name),
            escape(pair.baseline.name),
            _shape(pair.workload),
            f"{c.speedup:.3g} ({c.low:.3g} to {c.high:.3g})",
            c.verdict_text,
            style=_COLOURS[c.verdict],
        )
    return table
