"""Processes that do a part of a run beside it. A fork needs no imports and no copy of a model."""

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
# In seconds: a process that used no time of the processor for so long is stuck.
_STUCK = 30


def is_useful() -> bool:
    """Returns True if a core is free for a fork, and nothing that is known forbids it.

    Only Linux forks safely. A lock that another Python thread holds would stay locked; the thread of rich, which draws
    the running step, holds none that `running` leaves in use. A worker of a pool must not have children.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    are_harmless = all(type(thread).__module__.partition(".")[0] == "rich" for thread in others)
    is_worker = multiprocessing.current_process().daemon
    return sys.platform == "linux" and usable_cores() > 1 and are_harmless and not is_worker


@contextlib.contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess | None]:
    """Calls a function in a forked process, which is killed at the end of the block.

    The process ignores signals that end programs until the function handles them, and dies with this process. What it
    prints goes to standard error. Its exit code is 1 after an error, which is not shown.

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
        before, used = used, _processor_seconds(process)
        if used == before:
            _stop(process)
        process.join(_STUCK)
    return process.exitcode == 0


def _processor_seconds(process: BaseProcess) -> float:
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
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(2, 1)
        # The parent's objects may have locks, such as that of rich's display.
        sys.stdout = sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), errors="replace", write_through=True
        )
        function(*arguments)
        code = 0
    finally:
        os._exit(code)
