"""One attempt at one config: a process that is watched, and ended where it takes too much."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from optexport.batch.ended import Ended
from optexport.batch.tasks import Task
from optexport.errors import OptexportError, first_line

_EVERY_SECONDS = 0.1
# What a process has to end by itself, once it was asked to.
_GRACE_SECONDS = 10.0
# To start a process is also to look after all others; of two threads that ask how one ended, one gets no answer.
_LOCK = threading.Lock()
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["optexport.batch.child"])


@dataclass(frozen=True)
class Limits:
    """What a config may take.

    Attributes:
        memory: Bytes resident, of all processes of a config.
        seconds: Wall-clock seconds of an attempt.
        retries: How often one is started again that crashed, took too long, or was killed by the system.
    """

    memory: int
    seconds: float
    retries: int


def make_ready() -> None:
    """Has the process from which others are forked import what they need, so that no attempt is charged for it.

    Raises:
        OptexportError: No process can be started.
    """
    process = _CONTEXT.Process(target=_import)
    with _LOCK:
        process.start()
    _join(process)
    if process.exitcode != 0:
        raise OptexportError(f"a process that does nothing ended with {process.exitcode}", place="batch")


def _import() -> None:
    """Nothing: the process that is forked has it all."""


def attempts(task: Task, limits: Limits, folder: Path, stop: threading.Event) -> Ended:
    """Runs a config, and again where it neither ended by itself nor took too much memory.

    Args:
        folder: Takes the log and the document of each attempt, by the config's name and place.
        stop: Set where the batch is to end.
    """
    for count in range(1, limits.retries + 2):
        ended, again = _attempt(task, limits, folder, count, stop)
        if not again or stop.is_set():
            break
    return ended


def log_name(task: Task) -> str:
    """What the log and the document of a config are called, without their suffixes."""
    return f"{task.path.stem}-{hashlib.sha256(os.fsencode(task.path)).hexdigest()[:8]}"


def _attempt(task: Task, limits: Limits, folder: Path, count: int, stop: threading.Event) -> tuple[Ended, bool]:
    """How an attempt ended, and whether another might end otherwise."""
    document, log = (folder / f"{log_name(task)}{suffix}" for suffix in (".json", ".log"))
    document.unlink(missing_ok=True)  # of an earlier one
    start = time.monotonic()
    environment = dict(os.environ)
    process = _CONTEXT.Process(
        target=_run, args=(["run", str(task.path), "--json"], str(document), str(log), environment), daemon=False
    )
    with _LOCK:
        process.start()
    assert process.pid is not None
    peak, why = 0, None
    try:
        while not _has_ended(process, _EVERY_SECONDS):
            peak = max(peak, used := _resident(process.pid))
            if used > limits.memory:
                why = f"it took more than {limits.memory / 2**30:.1f} GiB of memory"
            elif time.monotonic() - start > limits.seconds:
                why = f"it was still at work after {limits.seconds:.0f} s"
            elif stop.is_set():
                why = "interrupted"
            if why is not None:
                break
    finally:
        _end(process, at_once=why is not None and not stop.is_set())
    seconds = round(time.monotonic() - start, 1)
    code = process.exitcode
    assert code is not None
    told = _read(document)
    ended_itself = why is None and code >= 0
    if ended_itself:
        error = told.get("error") or told.get("tracking_failure")
        if code and not error:
            error = f"it ended with {code} and said nothing"
    else:
        error = why or _killed_by(-code)
    ended = Ended(
        task.name,
        task.digest,
        code if ended_itself else 1,
        f"{error}\n  Its log: {log}" if error and not ended_itself else error,
        told.get("output") if ended_itself else None,
        told.get("mlflow_run_id") if ended_itself else None,
        count,
        seconds,
        peak,
    )
    return ended, not ended_itself and peak <= limits.memory


def _run(*arguments: Any) -> None:
    """Imports in the forked process, so that the one that watches need not."""
    from optexport.batch import child

    child.run(*arguments)


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return "it was killed by SIGKILL, as the system does where memory runs out"
    return f"it crashed by {name}"


def _read(document: Path) -> dict[str, Any]:
    try:
        found = json.loads(document.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"error": f"it left no account of itself: {first_line(error)}"}
    return found if isinstance(found, dict) else {}


def _end(process: Any, *, at_once: bool) -> None:
    """Ends a process and all that it started, politely where there is time."""
    if not at_once and not _has_ended(process, 0):
        _signal(process, signal.SIGTERM)
        _has_ended(process, _GRACE_SECONDS)
    _signal(process, signal.SIGKILL)
    _join(process)


def _has_ended(process: Any, seconds: float) -> bool:
    """Waits so long for the end of a process, and reads nothing of it."""
    return bool(connection.wait([process.sentinel], seconds))


def _join(process: Any) -> None:
    connection.wait([process.sentinel])
    with _LOCK:
        process.join()


def _signal(process: Any, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
        return
    if not _has_ended(process, 0):  # it has not come as far as a group of its own
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _resident(session: int) -> int:
    """Bytes resident of all processes of a session."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # What follows the name, which may hold spaces: state, parent, group, session, ...
                fields = (
                    Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                )
                if int(fields[3]) == session or int(entry.name) == session:
                    total += int(fields[21]) * _PAGE
    return total


_PAGE = os.sysconf("SC_PAGE_SIZE")
