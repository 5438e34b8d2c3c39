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
# The same for a table with speedups, which shows these neither.
_WIDE_WITH_SPEEDUPS = 145
_LESS_IMPORTANT_THAN_SPEEDUPS = ("p99 ms", "rows/s", "file")
# Between the folder of a bundle and the format, in names of artifacts.
_SEPARATOR = ": "
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
        # The first words of the table's verdicts, because `verdict` calls equal times inconclusive.
        verdicts = Counter(pair.comparison.verdict_text.split()[0].rstrip(":") for pair in self.comparisons)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "no comparisons"
        names = dict.fromkeys(figures.artifact.name for figures in self.figures)
        return f"Report({', '.join(names)}; {counts})"

    @property
    def rounds(self) -> int:
        """Number of measured rounds, which a comparison may increase and a deadline reduce."""
        return max((pair.comparison.rounds for pair in self.comparisons), default=self.settings.rounds)

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
        "rounds": report.rounds,
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
    baseline = _find_baseline(report)
    wide = _WIDE if baseline is None else _WIDE_WITH_SPEEDUPS
    is_narrow = console.width < wide
    console.print(figures_table(report, is_narrow=is_narrow))
    if is_narrow:
        hidden = ", ".join(_hidden_headings(report))
        console.print(f"A terminal of {wide} columns also shows {hidden}.", highlight=False)
    if report.comparisons and baseline is None:
        console.print(comparison_table(report))
    threads = f"{report.settings.threads} thread{'s' if report.settings.threads != 1 else ''}"
    over = "" if baseline is None else f"; speedups are over {baseline.name.removeprefix(_common_prefix(report))}"
    text = f"Measured with {threads} each, in {report.rounds} rounds{over}."
    console.print(text, soft_wrap=True, highlight=False, markup=False)
    unproven = sorted({f.artifact.name for f in report.figures if not f.artifact.proven and f.artifact.prepare is None})
    for note in report.notes:
        console.print(escape(note), soft_wrap=True, highlight=False)
    if unproven:
        console.print(
            f"Not part of a bundle, so never compared with a model: {escape(', '.join(unproven))}",
            soft_wrap=True,
            highlight=False,
        )


def figures_table(report: Report, *, is_narrow: bool = False) -> Table:
    """Returns a table with a row for every artifact and shape; a narrow one has fewer columns.

    If all comparisons have the same baseline, the table has the speedups over it.
    """
    prefix, baseline = _common_prefix(report), _find_baseline(report)
    comparisons = {(pair.artifact, pair.workload.label): pair.comparison for pair in report.comparisons}
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=escape(prefix.removesuffix(_SEPARATOR)) or None, title_justify="left"
    )
    headings = ["p50 ms", "p90 ms", "p99 ms", "rows/s", "load s", "memory", "file"]
    shown = [heading for heading in headings if not (is_narrow and heading in _hidden_headings(report))]
    for heading in ("artifact", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    if baseline is not None:
        table.add_column("speedup (95 % interval)", no_wrap=True)
        table.add_column("verdict")
    for f in report.figures:
        times = [f"{1e3 * seconds:.3g}" for seconds in (f.p50, f.p90, f.p99)]
        memory = "?" if f.peak_memory is None else size_in_words(f.peak_memory)
        texts = [*times, f"{f.rows_per_second:.4g}", f"{f.load:.2g}", memory, size_in_words(f.artifact.size)]
        cells = dict(zip(headings, texts, strict=True))
        row = [escape(f.artifact.name.removeprefix(prefix)), _shape(f.workload), *(cells[name] for name in shown)]
        comparison = None if baseline is None else comparisons.get((f.artifact, f.workload.label))
        if comparison is not None:
            row += [_speedup_text(comparison), comparison.verdict_text]
        elif f.artifact == baseline:
            row += ["1", "baseline"]
        table.add_row(*row, style=None if comparison is None else _COLOURS[comparison.verdict])
    return table


def _find_baseline(report: Report) -> Artifact | None:
    """Returns the baseline of all comparisons; None if there are several, or no comparisons."""
    baselines = {pair.baseline for pair in report.comparisons}
    return baselines.pop() if len(baselines) == 1 else None


def _hidden_headings(report: Report) -> tuple[str, ...]:
    """Returns the columns that a narrow table does not have."""
    return _LESS_IMPORTANT if _find_baseline(report) is None else (*_LESS_IMPORTANT, *_LESS_IMPORTANT_THAN_SPEEDUPS)


def _common_prefix(report: Report) -> str:
    """Returns the folder that all names start with, such as ``build/model: ``; empty if they differ."""
    prefixes = {"".join(figures.artifact.name.rpartition(_SEPARATOR)[:2]) for figures in report.figures}
    return prefixes.pop() if len(prefixes) == 1 else ""


def _speedup_text(comparison: Comparison) -> str:
    return f"{comparison.speedup:.3g} ({comparison.low:.3g} to {comparison.high:.3g})"


def _shape(workload: Workload) -> str:
    return escape(workload.label.replace(",", ", "))  # lines break between sizes, not within one


def comparison_table(report: Report) -> Table:
    """Returns a table with a row for every pair and shape."""
    table, prefix = Table(box=box.SIMPLE_HEAD, pad_edge=False), _common_prefix(report)
    for heading in ("artifact", "baseline", "shape"):
        table.add_column(heading, overflow="fold")
    table.add_column("speedup (95 % interval)", no_wrap=True)
    table.add_column("verdict")
    for pair in report.comparisons:
        c = pair.comparison
        table.add_row(
            escape(pair.artifact.name.removeprefix(prefix)),
            escape(pair.baseline.name.removeprefix(prefix)),
            _shape(pair.workload),
            _speedup_text(c),
            c.verdict_text,
            style=_COLOURS[c.verdict],
        )
    return table
