"""Outcomes of tuning: prints them, and returns them as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport.bench.comparison import Comparison
from optexport.config.benchmarks import LEAST_ROUNDS
from optexport.config.schema import Format

AS_CONFIGURED = "as configured"
PARITY_FAILED = "parity failed"


@dataclass(frozen=True)
class Trial:
    """A candidate that was tried.

    Attributes:
        change: Difference from the configured candidate, in words.
        rules: Positions of its rules in the config.
        passes: Its format passes.
        refused: Why its file cannot be shipped; None if it can.
        comparison: Speed relative to the outcome's measure; None if it was not measured.
        earlier: True if an earlier run tried it.
    """

    change: str
    rules: tuple[int, ...]
    passes: tuple[str, ...]
    refused: str | None = None
    comparison: Comparison | None = None
    earlier: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome of tuning one format.

    Attributes:
        format: The format.
        chosen: The candidate of the exported file.
        measure: Baseline of all comparisons, in words: the configured candidate, or the part of it that passes.
        over_plain: Speed of the chosen candidate relative to the plain export; None if the plain export was refused or
            chosen.
        trials: All trials, in order.
        untried: Candidates that were not tried for lack of time, in words.
    """

    format: Format
    chosen: Trial
    measure: str
    over_plain: Comparison | None
    trials: tuple[Trial, ...]
    untried: tuple[str, ...] = ()


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns the outcomes as a document."""
    return [asdict(outcome) for outcome in outcomes]


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints all trials, and the chosen ones."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("format")
    table.add_column("candidate", overflow="fold")
    table.add_column("speedup (95 % interval)", no_wrap=True)
    table.add_column("result", overflow="fold")
    for outcome in outcomes:
        for trial in outcome.trials:
            speedup = "" if trial.comparison is None else _speedup_text(trial.comparison)
            table.add_row(outcome.format, escape(trial.change), speedup, escape(_result_text(outcome, trial)))
    console.print(table)
    for outcome in outcomes:
        if outcome.measure != AS_CONFIGURED:
            text = f"[bold red]{outcome.format}: the configured candidate was rejected; speedups are over"
            console.print(f"{text}[/] {escape(outcome.measure)}", soft_wrap=True, highlight=False)
        plain = outcome.over_plain
        speedup = "" if plain is None else f", speedup over the plain export {_speedup_text(plain)}"
        console.print(f"{outcome.format}: {escape(outcome.chosen.change)}{speedup}", soft_wrap=True, highlight=False)
        if outcome.untried:
            console.print(f"  no time for: {escape('; '.join(outcome.untried))}", soft_wrap=True, highlight=False)


def _speedup_text(comparison: Comparison) -> str:
    return f"{comparison.speedup:.3g} ({comparison.low:.3g} to {comparison.high:.3g})"


def _result_text(outcome: Outcome, trial: Trial) -> str:
    comparison = trial.comparison
    if trial.refused is not None:
        text = f"rejected: {trial.refused}"
    elif comparison is None:
        text = "" if trial.change == outcome.measure else "not measured"
    elif comparison.rounds >= LEAST_ROUNDS:
        text = comparison.verdict_text
    else:
        text = f"dropped out after {comparison.rounds} rounds"
    text += " (earlier run)" if trial.earlier else ""
    if trial.change == outcome.chosen.change:
        text = f"{text}; chosen" if text else "chosen"
    return text
