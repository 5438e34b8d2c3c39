"""What came of tuning, for people and for machines."""

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
NOT_THE_SAME = "not the same"


@dataclass(frozen=True)
class Trial:
    """One recipe that was tried.

    Attributes:
        change: What is other in it than in the config, in words.
        rules: The positions of its rules in the config.
        refused: Why no file of it could be shipped; None where one could.
        comparison: How fast it is, by the measure of the outcome; None where it was not measured.
        earlier: Whether that was seen by an earlier run, of which it was kept.
    """

    change: str
    rules: tuple[int, ...]
    passes: tuple[str, ...]
    refused: str | None = None
    comparison: Comparison | None = None
    earlier: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of tuning one format.

    Attributes:
        chosen: The recipe of the file that is shipped.
        measure: What others are compared with, in words: what is configured, or what of it passes.
        over_plain: How fast that is, with the plain export as the measure; None where the plain export was refused, or
            is what was chosen.
        trials: All that were tried, in that order.
        untried: What there was no time for, in words.
    """

    format: Format
    chosen: Trial
    measure: str
    over_plain: Comparison | None
    trials: tuple[Trial, ...]
    untried: tuple[str, ...] = ()


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The outcomes as a document."""
    return [asdict(outcome) for outcome in outcomes]


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints what was tried, and what was chosen."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("format")
    table.add_column("tried", overflow="fold")
    table.add_column("times as fast as configured (95 % interval)", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for outcome in outcomes:
        for trial in outcome.trials:
            c = trial.comparison
            figures = "" if c is None else f"{c.speedup:.3g} ({c.low:.3g} to {c.high:.3g})"
            if trial.refused is not None:
                verdict = f"refused: {trial.refused}"
            elif c is None:
                verdict = "" if trial.change == outcome.measure else "not measured"
            else:
                verdict = c.told if c.rounds >= LEAST_ROUNDS else f"dropped out after {c.rounds} rounds"
            verdict += " (earlier run)" if trial.earlier else ""
            if trial.change == outcome.chosen.change:
                verdict = f"{verdict}; chosen" if verdict else "chosen"
            table.add_row(outcome.format, escape(trial.change), figures, escape(verdict))
    console.print(table)
    for outcome in outcomes:
        if outcome.measure != AS_CONFIGURED:
            text = f"[bold red]{outcome.format}: what is configured was refused; the ratios are over"
            console.print(f"{text}[/] {escape(outcome.measure)}", soft_wrap=True, highlight=False)
        c = outcome.over_plain
        figures = "" if c is None else f", {c.speedup:.3g} ({c.low:.3g} to {c.high:.3g}) times as fast as plain"
        console.print(f"{outcome.format}: {escape(outcome.chosen.change)}{figures}", soft_wrap=True, highlight=False)
        if outcome.untried:
            console.print(f"  no time for: {escape('; '.join(outcome.untried))}", soft_wrap=True, highlight=False)
