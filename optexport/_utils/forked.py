"""Processes that do a part of a run beside it. A fork needs no imports and no copy of a model."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from optexport._utils.platform import usable_cores

# From <linux/prctl.h>: the signal that a process receives when its parent ends.
_PR_SET_PDEATHSIG = 1


def is_useful() -> bool:
    """Returns True if a fork is safe and a core is free for it.

    Only Linux forks safely. A lock that another thread holds would stay locked; the thread of rich, which draws the
    running step, holds none that the functions here need.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    are_harmless = all(type(thread).__module__.partition(".")[0] == "rich" for thread in others)
    return sys.platform == "linux" and usable_cores() > 1 and are_harmless


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess | None:
    """Calls a function in a forked process; returns None if the system allows no further process.

    The process ignores signals that end programs, because this process handles them, and dies with this process. What
    it prints goes to standard error. Its exit code is 1 after an error, which is not shown.
    """
    process = multiprocessing.get_context("fork").Process(target=_run, args=(function, *arguments), daemon=True)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch's idle threads
        try:
            process.start()
        except OSError:
            return None
    return process


def stop(process: BaseProcess) -> None:
    """Kills a process if it still runs, and waits for its end."""
    process.kill()
    process.join()


def _run(function: Callable[..., None], *arguments: Any) -> None:
    """Calls the function, and ends without the cleanups of the parent, such as flushing its output."""
    code = 1
    try:
        os.setsid()  # signals of a terminal are for the parent
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(2, 1)
        function(*arguments)
        code = 0
    finally:
        os._exit(code)
