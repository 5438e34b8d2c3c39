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

from optexport.batch.results import TaskResult, worst_exit_code
from optexport.errors import OptexportError, TrackingError, on_one_line

_WORDS = {
    0: "passed",
    1: "error",
    2: "invalid config",
    3: "not loaded or traced",
    4: "check failed",
    5: "not exported",
    6: "gate failed",
    7: "not tracked",
}


def describe(result: TaskResult) -> str:
    """Returns a result in one to three words."""
    if result.attempts == 0:
        return "passed before"
    return _WORDS.get(result.exit_code, f"exit code {result.exit_code}")


def format_line(result: TaskResult) -> str:
    """Returns a result on one line."""
    error = f": {_first_line(result)}" if result.error else ""
    return f"{on_one_line(result.config)}: {describe(result)} ({result.seconds:.0f} s){error}"


def print_table(results: Sequence[TaskResult], console: Console) -> None:
    """Prints a table of the results, and the errors below it.

    Args:
        results: Results of the configs.
        console: The console to print to.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("config", "result", "bundle"):
        table.add_column(heading, overflow="fold")
    for heading in ("s", "peak MiB", "attempts"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            escape(on_one_line(result.config)),
            describe(result),
            escape(on_one_line(result.output or "")),
            f"{result.seconds:.0f}",
            f"{result.peak_memory / 2**20:.0f}",
            str(result.attempts),
        )
    console.print(table)
    for result in results:
        if result.error:
            console.print(f"[bold]{escape(on_one_line(result.config))}[/]: {escape(result.error)}", soft_wrap=True)
    counts = Counter(map(describe, results))
    console.print(", ".join(f"{count} {words}" for words, count in counts.most_common()))


def as_json(results: Sequence[TaskResult], run_id: str | None, failures: Sequence[OptexportError]) -> dict[str, Any]:
    """Returns the JSON document of a batch.

    Args:
        results: Results of the configs.
        run_id: The MLflow run of the batch, if any.
        failures: Errors of MLflow.
    """
    code = worst_exit_code(results) or (TrackingError.exit_code if failures else 0)
    return {
        "passed": code == 0,
        "exit_code": code,
        "configs": [asdict(result) for result in results],
        "mlflow_run_id": run_id,
        "tracking_failures": list(map(str, failures)),
    }


def columns(results: Sequence[TaskResult]) -> dict[str, list[Any]]:
    """Returns the results as columns, the form that MLflow requires for tables."""
    rows = [{**asdict(result), "result": describe(result)} for result in results]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Returns the metrics of a batch for MLflow."""
    return {
        "configs": float(len(results)),
        "failed": float(sum(result.exit_code != 0 for result in results)),
        "seconds": sum(result.seconds for result in results),
        "peak_memory_bytes": float(max((result.peak_memory for result in results), default=0)),
    }


def _first_line(result: TaskResult) -> str:
    return (result.error or "").partition("\n")[0]
