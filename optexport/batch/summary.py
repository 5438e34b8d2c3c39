"""The result of a batch: as a table, as a JSON document, and as data for MLflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport._utils import notebook
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


@dataclass(frozen=True, repr=False)
class BatchResult:
    """Result of a batch.

    Attributes:
        results: The result of each config, in their order.
        run_id: The MLflow run of the batch; None without one.
        run_page: The URL of that run, after the command that serves it if necessary.
        tracking_failures: Errors of MLflow.
        empty: Why the batch had no config; None if it had some.
    """

    results: tuple[TaskResult, ...]
    run_id: str | None
    tracking_failures: tuple[OptexportError, ...] = ()
    empty: str | None = None
    run_page: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of ``optexport batch``: the worst one of its configs."""
        return worst_exit_code(self.results) or (TrackingError.exit_code if self.tracking_failures else 0)

    @property
    def passed(self) -> bool:
        """True if every config succeeded, and MLflow has all of it."""
        return self.exit_code == 0

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON document that ``optexport batch --json`` prints."""
        return {
            "passed": self.passed,
            "exit_code": self.exit_code,
            "configs": [asdict(result) for result in self.results],
            "mlflow_run_id": self.run_id,
            "tracking_failures": list(map(str, self.tracking_failures)),
        }

    def show(self, console: Console) -> None:
        """Prints a table of the results, and the errors below it."""
        if self.empty is not None:
            console.print(escape(self.empty), soft_wrap=True)
        else:
            print_table(self.results, console)
        if self.run_id is not None:
            console.print(f"MLflow run of the batch: {self.run_id}", soft_wrap=True)
        if self.run_page is not None:
            console.print(self.run_page, soft_wrap=True, highlight=False, markup=False)

    def summary(self) -> str:
        """Returns the text that ``optexport batch`` prints."""
        return notebook.as_text(self.show)

    def __repr__(self) -> str:
        counts = Counter(map(describe, self.results))
        return f"BatchResult({', '.join(f'{count} {words}' for words, count in counts.most_common()) or 'no config'})"

    def _repr_html_(self) -> str:
        return notebook.as_html(self.show)


def describe(result: TaskResult) -> str:
    """Returns a result in one to three words."""
    if result.attempts == 0:
        return "passed before"
    if result.ending is not None:
        return result.ending
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
