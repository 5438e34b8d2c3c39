"""Results of the configs of a batch, and the journal that stores them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from optexport.batch.tasks import Task
from optexport.bundle.parts import read_bundles
from optexport.config.toml_file import read_redacted
from optexport.errors import ConfigError, OptexportError, describe_error

JOURNAL = "journal.jsonl"

# Exit codes, the worst first: from a defect or crash to a bundle that was only not uploaded.
_WORST_FIRST = (1, 4, 5, 3, 2, 6, 7)


@dataclass(frozen=True)
class TaskResult:
    """Result of one config.

    Attributes:
        config: Path of the config as the user wrote it.
        path: Absolute path of the config.
        digest: SHA-256 of the config's text; empty if the file cannot be read.
        exit_code: Exit code of ``optexport run``; 1 if its process was killed.
        error: The error message, or the reason for a kill; None on success.
        ending: How its process ended without a result, such as ``crashed``; None with a result.
        output: The folder of the bundle, if it is complete.
        run_id: The MLflow run.
        attempts: Number of attempts; 0 if an earlier batch completed the config.
        seconds: Wall-clock seconds of the last attempt.
        peak_memory: Highest resident bytes of all its processes in any sample, including shared pages.
    """

    config: str
    path: str
    digest: str
    exit_code: int
    error: str | None = None
    output: str | None = None
    run_id: str | None = None
    attempts: int = 1
    seconds: float = 0.0
    peak_memory: int = 0
    ending: str | None = None


_ADAPTER = TypeAdapter(TaskResult)


def make_failed_result(task: Task, error: Exception) -> TaskResult:
    """Returns the result of a config that an error of the batch itself prevented."""
    return TaskResult(task.name, str(task.path), task.digest, 1, describe_error(error))


def worst_exit_code(results: Iterable[TaskResult]) -> int:
    """Returns the exit code of a batch, which is the worst of its configs."""
    codes = {result.exit_code for result in results} - {0}
    return min(codes, key=lambda code: _WORST_FIRST.index(code) if code in _WORST_FIRST else -1, default=0)


def append_to_journal(folder: Path, result: TaskResult) -> None:
    """Appends a result to the journal.

    Args:
        folder: Folder with the journal.
        result: Result of a config.
    """
    folder.mkdir(parents=True, exist_ok=True)  # the user may have removed the folder
    with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
        journal.write(f"\n{json.dumps(asdict(result))}\n")  # the last line may be truncated


def read_completed(folder: Path, tasks: Iterable[Task]) -> dict[Path, TaskResult]:
    """Returns the results of configs that an earlier batch completed, by path.

    A result counts if it is a success, the config's text is unchanged, and the bundle is complete.
    Truncated and foreign lines of the journal are ignored.

    Args:
        folder: Folder with the journal.
        tasks: The configs.

    Raises:
        ConfigError: The journal cannot be read.
    """
    path = folder / JOURNAL
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise ConfigError(f"the journal cannot be read: {error}", location=str(path)) from error
    last_results: dict[str, TaskResult] = {}
    for line in lines:
        try:
            result = _ADAPTER.validate_json(line, strict=True)
        except ValueError:
            continue
        last_results[result.path] = result
    completed = {}
    for task in tasks:
        last = last_results.get(str(task.path))
        if last is None or last.exit_code or last.digest != task.digest or not _is_up_to_date(task):
            continue
        completed[task.path] = replace(last, config=task.name, attempts=0, seconds=0.0, peak_memory=0)
    return completed


def _is_up_to_date(task: Task) -> bool:
    """Returns True if the bundle is complete and comes from the current config."""
    if task.output is None:
        return False
    try:
        text = read_redacted(task.path)
        bundles = read_bundles(task.output)
        return all((folder / "config.toml").read_text(encoding="utf-8") == text for folder in bundles)
    except (OSError, OptexportError):
        return False
