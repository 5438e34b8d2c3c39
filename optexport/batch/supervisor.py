"""One attempt at one config: a process that is watched, and ended where it takes too much."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from optexport.batch import processes
from optexport.batch.results import TaskResult
from optexport.batch.tasks import Task
from optexport.errors import ConfigError, OptexportError
from optexport.tracking.run import ATTEMPT_VARIABLE, LATER_VARIABLE

_EVERY_SECONDS = 0.1
# What a process has to end by itself, once it was asked to.
_GRACE_SECONDS = 10.0
# To start a process is also to look after all others; of two threads that ask how one ended, one gets no answer.
_LOCK = threading.Lock()
# Has Python import nothing from where it is called, which no command of optexport's does.
_SAFE_PATH = "PYTHONSAFEPATH"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["optexport.batch.worker"])


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
    before = os.environ.get(_SAFE_PATH)
    with _LOCK:
        os.environ[_SAFE_PATH] = "1"
        try:
            _start_server()
            process = _started(_import)
        except BaseException:
            _end_server()
            raise
        finally:
            os.environ.pop(_SAFE_PATH)
            if before is not None:
                os.environ[_SAFE_PATH] = before
    _join(process)
    if process.exitcode != 0:
        raise OptexportError(f"a process that does nothing ended with {process.exitcode}", location="batch")


def _start_server() -> None:
    """Starts the process from which others are forked, deaf to the signals that a terminal sends to all of a batch.

    It would end with a traceback in the middle of its imports; so it ends as the batch does, on which it hangs.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    sent = (signal.SIGINT, signal.SIGHUP) if in_main_thread else ()
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in sent}
    try:
        forkserver.ensure_running()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_server() -> None:
    """Ends it in the middle of its imports: until their end it holds the terminal of a batch that is interrupted."""
    server: Any = forkserver  # whose process has no public name
    server = server._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)


def _import() -> None:
    """Nothing: the process that is forked has it all."""


def attempts(task: Task, limits: Limits, folder: Path, stop: threading.Event) -> TaskResult:
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
    return f"{task.path.stem[:100]}-{hashlib.sha256(os.fsencode(task.path)).hexdigest()[:8]}"


def _attempt(task: Task, limits: Limits, folder: Path, count: int, stop: threading.Event) -> tuple[TaskResult, bool]:
    """How an attempt ended, and whether another might end otherwise."""
    document, log = (folder / f"{log_name(task)}{suffix}" for suffix in (".json", ".log"))
    document.unlink(missing_ok=True)  # of an earlier one
    start = time.monotonic()
    attempt = uuid.uuid4().hex
    environment = {**os.environ, ATTEMPT_VARIABLE: attempt}
    with _LOCK:
        process = _started(_run, ["run", str(task.path), "--json"], str(document), str(log), environment)
    assert process.pid is not None
    peak, why = 0, None
    try:
        while not _has_ended(process, _EVERY_SECONDS):
            used = processes.used(processes.below(process.pid), limits.memory)
            peak = max(peak, used)
            if used > limits.memory:
                why = f"it took more than {limits.memory / 2**30:.1f} GiB of memory"
            elif time.monotonic() - start > limits.seconds:
                why = f"it was still at work after {limits.seconds:.0f} s"
            elif stop.is_set():
                why = "interrupted"
            if why is not None:
                break
    finally:
        _end(process, at_once=peak > limits.memory)
    seconds = round(time.monotonic() - start, 1)
    told = _read(document) if why is None else None
    if told is not None:
        code, error = int(told["exit_code"]), told.get("error")
        output, run_id = told.get("output"), told.get("mlflow_run_id")
    else:  # however it ended, it was no end of its own
        reason = why or _how(process.exitcode)
        run_id, told_of_run = _lost_run(task, attempt, reason, "FAILED" if why is None else "KILLED")
        code, output, error = 1, None, f"{reason}\n  Its log: {log}{told_of_run}"
    ended = TaskResult(task.name, str(task.path), task.digest, code, error, output, run_id, count, seconds, peak)
    return ended, told is None and peak <= limits.memory


def _started(target: Callable[..., None], *arguments: Any) -> Any:
    """A process that does something; where the one that forks them was killed, the next takes its place.

    Raises:
        ConfigError: No socket can be made where temporary files go.
    """
    for pause in (0.1, 1.0, None):  # the system may not know yet that it is gone
        process = _CONTEXT.Process(target=target, args=arguments)
        try:
            process.start()
            break
        except (EOFError, ConnectionError):
            if pause is None:
                raise
            time.sleep(pause)
        except OSError as error:
            if str(error) != "AF_UNIX path too long":
                raise
            raise ConfigError(
                "the path of the folder for temporary files is too long for a socket",
                location=tempfile.gettempdir(),
                hint="Set TMPDIR to a folder whose path is shorter than 60 characters.",
            ) from error
    return process


def _lost_run(task: Task, attempt: str, reason: str, status: str) -> tuple[str | None, str]:
    """Ends the MLflow run of an attempt that did not end it; its id, and what is to be told of it."""
    if task.config is None or not task.config.tracking.enabled or os.environ.get(LATER_VARIABLE):
        return None, ""
    from optexport.tracking.batch import end_lost

    try:
        lost = end_lost(task.config.tracking, task.path, attempt, reason, status)
    except OptexportError as error:
        return None, f"\n  {error}"
    return next(iter(lost), None), "".join(f"\n  Its MLflow run {run_id} was ended as {status}." for run_id in lost)


def _run(*arguments: Any) -> None:
    """Imports in the forked process, so that the one that watches need not."""
    from optexport.batch import worker

    worker.run(*arguments)


def _how(code: int | None) -> str:
    """How a process ended that left no account of itself."""
    assert code is not None
    if -code == signal.SIGKILL:
        return "it was killed by SIGKILL, as the system does where memory runs out"
    if -code in set(signal.Signals):
        return f"it crashed by {signal.Signals(-code).name}"
    return f"it ended with {code} and left no account of itself"


def _read(document: Path) -> dict[str, Any] | None:
    """What a run printed of itself, whole; None where it did not."""
    try:
        found = json.loads(document.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "exit_code" in found else None


def _end(process: Any, *, at_once: bool) -> None:
    """Ends a process and all below it, politely where there is time; the one that guards it sees to the rest."""
    if not at_once and not _has_ended(process, 0):
        processes.tell(process.pid, signal.SIGTERM)
        _has_ended(process, _GRACE_SECONDS)
    while not _has_ended(process, _EVERY_SECONDS / 10):
        processes.end(processes.below(process.pid))
    _join(process)


def _has_ended(process: Any, seconds: float) -> bool:
    """Waits so long for the end of a process, and reads nothing of it."""
    return bool(connection.wait([process.sentinel], seconds))


def _join(process: Any) -> None:
    connection.wait([process.sentinel])
    with _LOCK:
        process.join()
