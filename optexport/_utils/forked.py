"""Forked processes for parts of a run. A fork needs no imports and no copy of a model."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from optexport._utils import signals
from optexport._utils.platform import usable_cores

# From <linux/prctl.h>: the signal that a process receives when its parent ends.
_PR_SET_PDEATHSIG = 1
# A process without any CPU time in this many seconds is stuck.
_STUCK_SECONDS = 30


def is_useful() -> bool:
    """Returns True if this process can fork safely, and has a second core to use.

    - Only Linux forks safely.
    - If another Python thread holds a lock, it stays locked in the fork. The thread of rich, which draws the running
      step, only locks rich's display, which the fork does not use.
    - multiprocessing allows no children of a pool's worker.
    """
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    are_harmless = all(type(thread).__module__.partition(".")[0] == "rich" for thread in threads)
    is_worker = multiprocessing.current_process().daemon
    return sys.platform == "linux" and usable_cores() > 1 and are_harmless and not is_worker


@contextlib.contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess | None]:
    """Calls a function in a forked process, which is killed at the end of the block.

    The process dies with this process, and ignores signals that end programs. It prints to standard error. If the
    function fails, the exit code is 1, and the error is not shown.

    Yields None if the system allows no further process.
    """
    process = multiprocessing.get_context("fork").Process(target=_run, args=(function, *arguments), daemon=True)
    with contextlib.ExitStack() as stack:
        with signals.deferred(), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            is_started = _start(process)  # warns about the threads of torch, which are idle
            if is_started:
                stack.callback(_stop, process)
        yield process if is_started else None


def _start(process: BaseProcess) -> bool:
    try:
        process.start()
    except OSError:
        return False
    return True


def _stop(process: BaseProcess) -> None:
    process.kill()
    process.join()


def wait(process: BaseProcess) -> bool:
    """Waits until a process ends, and kills it if it is stuck. Returns whether its function ended without an error."""
    used = -1.0
    while process.is_alive():
        before, used = used, _cpu_seconds(process)
        if used == before:
            _stop(process)
        process.join(_STUCK_SECONDS)
    return process.exitcode == 0


def _cpu_seconds(process: BaseProcess) -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return -1.0
    return float(times.user + times.system)


def _run(function: Callable[..., None], *arguments: Any) -> None:
    """Calls the function, and ends without the cleanups of the parent, such as flushing its output."""
    code = 1
    try:
        os.setsid()  # signals of a terminal are for the parent
        signals.ignore()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(2, 1)
        # The objects of the parent may be locked.
        sys.stdout = sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), errors="replace", write_through=True
        )
        function(*arguments)
        code = 0
    finally:
        os._exit(code)
