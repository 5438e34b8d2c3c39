"""How a config of a batch ended, and the journal that remembers it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from optexport.batch.tasks import Task
from optexport.bundle.parts import read_bundles
from optexport.config.text import without_secrets
from optexport.errors import ConfigError, OptexportError, first_line

JOURNAL = "journal.jsonl"

# The worst first: a defect or a crash, numbers that differ, and so on to a bundle that is whole and was not tracked.
_WORST_FIRST = (1, 4, 5, 3, 2, 6, 7)


@dataclass(frozen=True)
class TaskResult:
    """How one config ended.

    Attributes:
        config: Its path as it was given.
        path: The same, from the root.
        digest: SHA-256 of its text.
        exit_code: That of ``optexport run``; 1 also where its process was killed, and by whom `error` says.
        error: What went wrong; None where nothing did.
        output: The folder of the bundle, where one is whole.
        run_id: The MLflow run.
        attempts: How often it was started; 0 of one that an earlier batch had done.
        seconds: Wall-clock seconds of the last attempt.
        peak_memory: Bytes resident at the peak, of all its processes, as far as was seen; shared pages included.
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


_ENDED = TypeAdapter(TaskResult)


def not_run(task: Task, error: Exception) -> TaskResult:
    """A config that could not be run at all."""
    return TaskResult(task.name, str(task.path), task.digest, 1, f"{type(error).__name__}: {first_line(error)}")


def worst(ended: Iterable[TaskResult]) -> int:
    """The exit code of a batch: the worst of its configs."""
    codes = {each.exit_code for each in ended} - {0}
    return min(codes, key=lambda code: _WORST_FIRST.index(code) if code in _WORST_FIRST else -1, default=0)


def remember(folder: Path, ended: TaskResult) -> None:
    """Writes down how a config ended, before anything else is done."""
    folder.mkdir(parents=True, exist_ok=True)  # someone may have removed it
    with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
        journal.write(f"\n{json.dumps(asdict(ended))}\n")  # the last line may have been cut off


def done_before(folder: Path, tasks: Iterable[Task]) -> dict[Path, TaskResult]:
    """The configs, by path, that ended well when they were last run, whose text is the same, and whose bundle is whole.

    A line that was cut off, as where the machine went down, or that holds something else, counts for nothing.

    Raises:
        ConfigError: The journal cannot be read.
    """
    path = folder / JOURNAL
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error}", location=str(path)) from error
    last: dict[str, TaskResult] = {}
    for line in lines:
        try:
            ended = _ENDED.validate_json(line, strict=True)
        except ValueError:
            continue
        last[ended.path] = ended
    found = {}
    for task in tasks:
        before = last.get(str(task.path))
        if before is None or before.exit_code or before.digest != task.digest or not _is_made_of(task):
            continue
        found[task.path] = replace(before, config=task.name, attempts=0, seconds=0.0, peak_memory=0)
    return found


def _is_made_of(task: Task) -> bool:
    """Whether the bundle of a config, or each part of it, is whole and was made of the config as it is."""
    if task.output is None:
        return False
    try:
        text = without_secrets(task.path)
        bundles = read_bundles(task.output)
        return all((folder / "config.toml").read_text(encoding="utf-8") == text for folder in bundles)
    except (OSError, OptexportError):
        return False
