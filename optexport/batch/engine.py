"""Runs the tasks of a batch on an engine, and records their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from optexport._utils.atomic_dir import locked
from optexport.batch.results import JOURNAL, TaskResult, append_to_journal, read_completed
from optexport.batch.tasks import Task
from optexport.errors import ConfigError

_LOGS = "logs"

# Runs tasks, and yields each task with its result when it ends. The path is the folder for logs.
Engine = Callable[[Sequence[Task], Path], Iterator[tuple[Task, TaskResult]]]


def run_tasks(
    tasks: Sequence[Task],
    engine: Engine,
    folder: Path,
    *,
    resume: bool = False,
    announce: Callable[[TaskResult], None] = lambda result: None,
) -> list[TaskResult]:
    """Runs each config in a separate process, so that a crash affects no other config.

    Args:
        tasks: The configs.
        engine: Runs the configs.
        folder: Folder for logs and the journal.
        resume: Skip configs that the journal records as completed.
        announce: Called with each result immediately.

    Returns:
        The results in the order of the tasks.

    Raises:
        ConfigError: Another batch uses the folder, or the folder is not writable.
    """
    logs = folder / _LOGS
    with _locked(folder, logs):
        results = read_completed(folder, tasks) if resume else {}
        for result in results.values():
            announce(result)
        remaining = [task for task in tasks if task.path not in results]
        for task, result in engine(remaining, logs) if remaining else ():
            try:
                append_to_journal(folder, result)
            except OSError as error:  # for instance a full disk, which must not stop the other configs
                note = f"The result is not in the journal, so a resumed batch runs this config again: {error}"
                result = replace(result, error=f"{result.error}\n  {note}" if result.error else note)
            results[task.path] = result
            announce(result)
    return [results[task.path] for task in tasks]


@contextlib.contextmanager
def _locked(folder: Path, logs: Path) -> Iterator[None]:
    """Locks the logs; a lock on the folder itself would block runs with bundles in it."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (folder / JOURNAL).open("a").close()
    except OSError as error:
        raise ConfigError(f"the folder is not writable: {error}", location=f"`folder={folder}`") from error
    with locked(logs, wait=False) as was_free:
        if not was_free:
            raise ConfigError(
                "another batch uses this folder",
                location=f"`folder={folder}`",
                hint="Wait for it, or name another folder.",
            )
        yield
