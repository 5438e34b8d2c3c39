"""How a config of a batch ended, and the journal that remembers it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from optexport.batch.tasks import Task
from optexport.errors import ConfigError

JOURNAL = "journal.jsonl"

# The worst first: a defect or a crash, numbers that differ, and so on to a bundle that is whole and was not tracked.
_WORST_FIRST = (1, 4, 5, 3, 2, 6, 7)


@dataclass(frozen=True)
class Ended:
    """How one config ended.

    Attributes:
        config: Its path as it was given.
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
    digest: str
    exit_code: int
    error: str | None = None
    output: str | None = None
    run_id: str | None = None
    attempts: int = 1
    seconds: float = 0.0
    peak_memory: int = 0


def worst(ended: Iterable[Ended]) -> int:
    """The exit code of a batch: the worst of its configs."""
    codes = {each.exit_code for each in ended} - {0}
    return min(codes, key=lambda code: _WORST_FIRST.index(code) if code in _WORST_FIRST else -1, default=0)


def remember(folder: Path, ended: Ended) -> None:
    """Writes down how a config ended, before anything else is done."""
    with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
        journal.write(f"\n{json.dumps(asdict(ended))}\n")  # the last line may have been cut off


def done_before(folder: Path, tasks: Iterable[Task]) -> dict[Path, Ended]:
    """The configs, by path, that ended well in an earlier batch: whose text is the same, and whose bundle is there.

    A line that was cut off, as where the machine went down, counts for nothing.

    Raises:
        ConfigError: The journal cannot be read.
    """
    path = folder / JOURNAL
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error}", place=str(path)) from error
    last: dict[tuple[str, str | None], Ended] = {}
    for line in lines:
        try:
            ended = Ended(**json.loads(line))
        except (ValueError, TypeError):
            continue
        last[ended.digest, ended.output] = ended
    found = {}
    for task in tasks:
        before = last.get((task.digest, str(task.output)))
        if before is not None and before.exit_code == 0 and Path(str(task.output)).is_dir():
            found[task.path] = Ended(task.name, task.digest, 0, None, before.output, before.run_id, 0)
    return found
