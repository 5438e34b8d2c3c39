"""Runs the configs of a batch, wherever: what ended before, what ends now, and the journal of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from optexport._utils.atomic_dir import locked
from optexport.batch.results import JOURNAL, TaskResult, done_before, remember
from optexport.batch.tasks import Task
from optexport.errors import ConfigError

_LOGS = "logs"

# Runs tasks, and gives each with how it ended, as it ends; takes the folder of the logs.
Engine = Callable[[Sequence[Task], Path], Iterator[tuple[Task, TaskResult]]]


def run(
    tasks: Sequence[Task],
    engine: Engine,
    folder: Path,
    *,
    resume: bool = False,
    announce: Callable[[TaskResult], None] = lambda ended: None,
) -> list[TaskResult]:
    """Runs each config in a process of its own; what happens to one happens to no other.

    Args:
        folder: Takes logs, and the journal.
        resume: Whether what the journal holds as done stays so.
        announce: Called as each ends.

    Returns:
        How each ended, in the order of the tasks.

    Raises:
        ConfigError: Another batch is at work in the folder, or nothing can be written there.
    """
    logs = folder / _LOGS
    with _locked(folder, logs):
        ended = done_before(folder, tasks) if resume else {}
        for each in ended.values():
            announce(each)
        left = [task for task in tasks if task.path not in ended]
        for task, found in engine(left, logs) if left else ():
            try:
                remember(folder, found)
            except OSError as error:  # as where the disk is full: the others go on
                told = f"The journal does not hold it, so --resume runs it again: {error}"
                found = replace(found, error=f"{found.error}\n  {told}" if found.error else told)
            ended[task.path] = found
            announce(found)
    return [ended[task.path] for task in tasks]


@contextlib.contextmanager
def _locked(folder: Path, logs: Path) -> Iterator[None]:
    """Locks the folder of the logs: a run waits for the one that its bundle lies in."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (folder / JOURNAL).open("a").close()
    except OSError as error:
        raise ConfigError(f"nothing can be written there: {error}", location=f"--folder {folder}") from error
    with locked(logs, wait=False) as was_free:
        if not was_free:
            raise ConfigError(
                "another batch is at work in it", location=f"--folder {folder}", hint="Wait, or name another folder."
            )
        yield
