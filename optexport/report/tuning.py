"""Reports the outcomes of tuning on the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport.bundle.outcomes import AS_CONFIGURED, LEAST_ROUNDS, Comparison, Outcome, Trial


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns the outcomes as a document."""
    return [asdict(outcome) for outcome in outcomes]


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints all trials, and the chosen ones."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("format")
    table.add_column("candidate", overflow="fold")
    baselines = {outcome.measure_text for outcome in outcomes}
    over = f" over\n{baselines.pop()}" if len(baselines) == 1 else ""
    table.add_column(f"speedup{escape(over)}\n(95 % interval)", no_wrap=True)
    table.add_column("result", overflow="fold")
    for outcome in outcomes:
        for trial in outcome.trials:
            speedup = "" if trial.comparison is None else _speedup_text(trial.comparison)
            table.add_row(outcome.format, escape(trial.change), speedup, escape(_result_text(outcome, trial)))
    if table.rows:
        console.print(table)
    for outcome in outcomes:
        if outcome.measure != AS_CONFIGURED:
            text = f"[bold red]{outcome.format}: the configured file was rejected; speedups are over"
            console.print(f"{text}[/] {escape(outcome.measure_text)}", soft_wrap=True, highlight=False)
        plain = outcome.over_plain
        speedup = "" if plain is None else f", speedup over the plain export {_speedup_text(plain)}"
        shapes = f" at {'; '.join(outcome.shapes)}" if outcome.shapes else ""
        text = f"{outcome.format}: {outcome.chosen.change}{speedup}{shapes}"
        console.print(escape(text), soft_wrap=True, highlight=False)
        if outcome.untried:
            console.print(escape(f"  {outcome.untried_text}"), soft_wrap=True, highlight=False)


def _speedup_text(comparison: Comparison) -> str:
    return f"{comparison.speedup:.3g} ({comparison.low:.3g} to {comparison.high:.3g})"


def _result_text(outcome: Outcome, trial: Trial) -> str:
    comparison = trial.comparison
    if trial.refused is not None:
        text = f"rejected: {trial.refused}"
    elif comparison is None:
        text = "baseline" if trial.change == outcome.measure else "not measured"
    elif comparison.rounds >= LEAST_ROUNDS:
        text = comparison.verdict_text
    else:
        text = f"dropped out after {comparison.rounds} rounds"
    text += " (earlier run)" if trial.earlier else ""
    if trial.change == outcome.chosen.change:
        text = f"{text}; chosen" if text else "chosen"
    return text
