"""Formats the results of a batch: a table, a JSON document, and data for MLflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport.batch.results import TaskResult, worst
from optexport.errors import OptexportError, TrackingError, on_one_line

_WORDS = {
    0: "proven",
    1: "ended badly",
    2: "wrong config",
    3: "not loaded or traced",
    4: "proof failed",
    5: "not exported",
    6: "gate failed",
    7: "not tracked",
}


def in_words(ended: TaskResult) -> str:
    """Returns a result in one to three words."""
    if ended.attempts == 0:
        return "done before"
    return _WORDS.get(ended.exit_code, f"ended with {ended.exit_code}")


def line(ended: TaskResult) -> str:
    """Returns a result on one line."""
    error = f": {_first_line(ended)}" if ended.error else ""
    return f"{on_one_line(ended.config)}: {in_words(ended)} ({ended.seconds:.0f} s){error}"


def show(ended: Sequence[TaskResult], console: Console) -> None:
    """Prints a table of the results, and the errors below it.

    Args:
        ended: Results of the configs.
        console: The console to print to.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("config", "result", "bundle"):
        table.add_column(heading, overflow="fold")
    for heading in ("s", "peak MiB", "attempts"):
        table.add_column(heading, justify="right")
    for each in ended:
        table.add_row(
            escape(on_one_line(each.config)),
            in_words(each),
            escape(on_one_line(each.output or "")),
            f"{each.seconds:.0f}",
            f"{each.peak_memory / 2**20:.0f}",
            str(each.attempts),
        )
    console.print(table)
    for each in ended:
        if each.error:
            console.print(f"[bold]{escape(on_one_line(each.config))}[/]: {escape(each.error)}", soft_wrap=True)
    counts = Counter(map(in_words, ended))
    console.print(", ".join(f"{count} {words}" for words, count in counts.most_common()))


def as_json(ended: Sequence[TaskResult], run_id: str | None, failures: Sequence[OptexportError]) -> dict[str, Any]:
    """Returns the JSON document of a batch.

    Args:
        ended: Results of the configs.
        run_id: The MLflow run of the batch, if any.
        failures: Errors of MLflow.
    """
    code = worst(ended) or (TrackingError.exit_code if failures else 0)
    return {
        "passed": code == 0,
        "exit_code": code,
        "configs": [asdict(each) for each in ended],
        "mlflow_run_id": run_id,
        "tracking_failures": list(map(str, failures)),
    }


def columns(ended: Sequence[TaskResult]) -> dict[str, list[Any]]:
    """Returns the results as columns, the form that MLflow requires for tables."""
    rows = [{**asdict(each), "result": in_words(each)} for each in ended]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def metrics(ended: Sequence[TaskResult]) -> dict[str, float]:
    """Returns the metrics of a batch for MLflow."""
    return {
        "configs": float(len(ended)),
        "failed": float(sum(each.exit_code != 0 for each in ended)),
        "seconds": sum(each.seconds for each in ended),
        "peak_memory_bytes": float(max((each.peak_memory for each in ended), default=0)),
    }


def _first_line(ended: TaskResult) -> str:
    return (ended.error or "").partition("\n")[0]
