"""Finds and ends all processes of an attempt, even outside its session or group.

A process inherits the environment of the process that starts it. So a variable whose value starts with a unique mark
identifies all processes that an attempt starts, directly or not.

``python -m optexport.batch.processes MARK FOLDER`` waits until the process that started it ends, and then cleans up.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from optexport.tracking.run import ATTEMPT_VARIABLE

_POLL_SECONDS = 0.01
# A process may start another one while the list of processes is read.
_EMPTY_SCANS = 2
_DONE = b"done"


class MarkedProcesses:
    """Processes whose attempt variable starts with a mark.

    The class reads the environment of each process only once, so a scan is fast.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._processes: dict[int, psutil.Process | None] = {}  # None: not marked, or ended
        self._is_complete = False

    def scan(self) -> Iterator[psutil.Process]:
        """Yields the marked processes that are alive, without waiting for the whole scan."""
        pids = psutil.pids()
        # A process that ended after the ids were listed may have started another one that is marked.
        self._is_complete = all(pid in pids or process is None for pid, process in self._processes.items())
        self._processes = {pid: self._processes[pid] for pid in pids if pid in self._processes}
        for pid in reversed(pids):  # the newest first
            if pid not in self._processes:
                self._read(pid)
            process = self._processes.get(pid)
            if process is not None and _is_alive(process):
                yield process
            elif process is not None:
                self._is_complete = False
                self._processes[pid] = None

    def _read(self, pid: int) -> None:
        """Records whether the environment of a process has the mark."""
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._is_complete = False
            return
        try:
            environment = process.environ()
        except (psutil.Error, OSError):  # a kernel thread, a zombie, or a process of another user
            if not _is_alive(process):
                self._is_complete = False
            self._processes[pid] = None
            return
        if environment:  # empty while a process replaces its program
            is_marked = environment.get(ATTEMPT_VARIABLE, "").startswith(self._mark)
            self._processes[pid] = process if is_marked else None

    def memory(self, limit: float) -> int:
        """Returns the resident memory of all marked processes in bytes.

        Shared pages count once per process. If that sum exceeds the limit, Linux divides them among the
        processes, which is slow to read.

        Args:
            limit: Bytes above which the proportional memory is read.
        """
        processes = list(self.scan())
        total = sum(map(_resident, processes))
        return total if total <= limit else sum(map(_proportional, processes))

    def kill(self) -> None:
        """Kills all marked processes, and returns when they have ended."""
        empty_scans = 0
        while empty_scans < _EMPTY_SCANS:
            is_empty = True
            for process in self.scan():
                is_empty = False
                with contextlib.suppress(psutil.Error):
                    process.kill()
            empty_scans = empty_scans + 1 if is_empty and self._is_complete else 0
            time.sleep(_POLL_SECONDS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0


@contextmanager
def cleanup_if_killed(mark: str, folder: Path) -> Iterator[None]:
    """Starts a cleaner that acts if this process is killed within the block.

    The cleaner kills the marked processes and removes the folder.

    Args:
        mark: Beginning of the attempt variable.
        folder: Folder with temporary files.
    """
    # Without -P, Python would import modules from the working directory.
    command = [sys.executable, "-P", "-m", "optexport.batch.processes", mark, str(folder)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals of the terminal are for the batch
    ) as cleaner:
        try:
            yield
        finally:
            assert cleaner.stdin is not None
            with contextlib.suppress(OSError):  # the cleaner itself was killed
                cleaner.stdin.write(_DONE)
                cleaner.stdin.close()


def main() -> None:
    """Waits for the end of standard input, and cleans up if nothing was written to it."""
    mark, folder = sys.argv[1:]
    if sys.stdin.buffer.read() != _DONE:
        MarkedProcesses(mark).kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
