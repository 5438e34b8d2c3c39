"""Runs a config in a separate process, and ends it if it exceeds its limits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.batch import processes
from optexport.batch.results import TaskResult
from optexport.batch.tasks import Task
from optexport.errors import OptexportError
from optexport.tracking.run import ATTEMPT_VARIABLE, LATER_VARIABLE

_POLL_SECONDS = 0.1
# Seconds for a process to exit after SIGTERM.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """Limits of a config.

    Attributes:
        memory: Resident bytes of all processes of an attempt.
        seconds: Wall-clock seconds of an attempt.
        retries: Number of further attempts after a crash, a timeout, or a kill by the system.
    """

    memory: int
    seconds: float
    retries: int


@contextmanager
def supervise(limits: Limits, logs: Path, stop: threading.Event) -> Iterator[Supervisor]:
    """Yields a supervisor, and removes its processes and temporary files afterwards.

    The cleanup also happens if this process is killed.

    Args:
        limits: Limits of each config.
        logs: Folder for the log and the JSON document of each config.
        stop: Set to end the batch.
    """
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="optexport-batch-", ignore_cleanup_errors=True) as temporary,
        processes.cleanup_if_killed(mark, Path(temporary)),
    ):
        yield Supervisor(limits, logs, stop, mark, Path(temporary))


@dataclass(frozen=True)
class Supervisor:
    """Runs configs as subprocesses.

    Attributes:
        limits: Limits of each config.
        logs: Folder for the log and the JSON document of each config.
        stop: Set to end the batch.
        mark: Beginning of the attempt variable in the environment of all processes.
        temporary: Folder that contains a temporary folder for each attempt.
    """

    limits: Limits
    logs: Path
    stop: threading.Event
    mark: str
    temporary: Path

    def run(self, task: Task) -> TaskResult:
        """Runs a config, and retries it after a crash, a timeout or a kill by the system.

        A config that wrote its result or exceeded its memory limit is not retried.
        """
        for count in range(1, self.limits.retries + 2):
            result, can_retry = self._attempt(task, count)
            if not can_retry or self.stop.is_set():
                break
        return result

    def _attempt(self, task: Task, count: int) -> tuple[TaskResult, bool]:
        document, log = (self.logs / f"{log_name(task)}{suffix}" for suffix in (".json", ".log"))
        attempt = f"{self.mark}-{uuid.uuid4().hex[:8]}"
        temporary = tempfile.mkdtemp(dir=self.temporary)
        marked = processes.MarkedProcesses(attempt)
        start = time.monotonic()
        try:
            process = _start(task, attempt, temporary, document, log)
            try:
                problem, peak = self._watch(process, marked, start)
            finally:
                _end(process, marked)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        seconds = round(time.monotonic() - start, 1)
        outcome = _try_read(document) if problem is None else None
        if outcome is not None:
            code, error = int(outcome["exit_code"]), outcome.get("error")
            output, run_id, ending = outcome.get("output"), outcome.get("mlflow_run_id"), None
        else:
            ending, reason = problem or _describe_exit(process.returncode)
            status = "FAILED" if problem is None else "KILLED"
            run_id, note = _end_tracked_run(task, attempt, reason, status)
            code, output, error = 1, None, f"{reason}\n  Log: {log}{note}"
        result = TaskResult(
            task.name, str(task.path), task.digest, code, error, output, run_id, count, seconds, peak, ending
        )
        return result, outcome is None and peak <= self.limits.memory

    def _watch(
        self, process: subprocess.Popen[bytes], marked: processes.MarkedProcesses, start: float
    ) -> tuple[tuple[str, str] | None, int]:
        """Waits until a process ends or exceeds a limit.

        Returns why to end it, if so, in one to three words and as a sentence, and its peak memory in bytes.
        """
        peak = 0
        while not _wait(process, _POLL_SECONDS):
            memory = marked.memory(self.limits.memory)
            peak = max(peak, memory)
            if memory > self.limits.memory:
                marked.kill()  # at once: the machine may have no memory left for a regular exit
                reason = f"the process used more than {self.limits.memory / 2**30:.1f} GiB of memory"
                return ("out of memory", reason), peak
            if time.monotonic() - start > self.limits.seconds:
                return ("timeout", f"the process did not finish within {self.limits.seconds:g} s"), peak
            if self.stop.is_set():
                return ("interrupted", "interrupted"), peak
        return None, peak


def log_name(task: Task) -> str:
    """Returns the name of a config's log and JSON document, without suffix."""
    return f"{task.path.stem[:100]}-{hashlib.sha256(os.fsencode(task.path)).hexdigest()[:8]}"


def _start(task: Task, attempt: str, temporary: str, document: Path, log: Path) -> subprocess.Popen[bytes]:
    # Without -P, Python would import modules from the working directory.
    command = [sys.executable, "-P", "-m", "optexport", "run", str(task.path), "--json"]
    with document.open("wb") as stdout, log.open("wb") as stderr:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, ATTEMPT_VARIABLE: attempt, "TMPDIR": temporary},
            start_new_session=True,  # signals of the terminal are for the batch
        )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for the end of a process, and returns True if it ended in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _end(process: subprocess.Popen[bytes], marked: processes.MarkedProcesses) -> None:
    """Ends a process with SIGTERM, and then kills all others of its attempt."""
    if not _wait(process, 0):
        process.terminate()
        _wait(process, _GRACE_SECONDS)
    marked.kill()
    process.wait()


def _end_tracked_run(task: Task, attempt: str, reason: str, status: str) -> tuple[str | None, str]:
    """Ends the MLflow run of a killed attempt; returns its id, and lines for the error."""
    if task.config is None or not task.config.tracking.enabled or os.environ.get(LATER_VARIABLE):
        return None, ""
    from optexport.tracking.batch import end_lost_runs

    try:
        run_ids = end_lost_runs(task.config.tracking, task.path, attempt, reason, status)
    except OptexportError as error:
        return None, f"\n  {error}"
    return next(iter(run_ids), None), "".join(f"\n  MLflow run {run_id} was ended as {status}." for run_id in run_ids)


def _describe_exit(code: int) -> tuple[str, str]:
    """Describes the exit of a process that wrote no result, in one word and as a sentence."""
    if -code == signal.SIGKILL:
        return "killed", "the process was killed by SIGKILL, for example because memory ran out"
    if -code in set(signal.Signals):
        return "crashed", f"the process crashed with {signal.Signals(-code).name}"
    return "no result", f"the process exited with {code} and wrote no result"


def _try_read(document: Path) -> dict[str, Any] | None:
    """Reads the JSON document of a run; returns None if it is not complete."""
    try:
        result = json.loads(document.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) and "exit_code" in result else None
