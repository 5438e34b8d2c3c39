"""Turns signals that end the program into KeyboardInterrupt, so that cleanups run.

Python swallows an exception in a finaliser. So the module also stores the signal, and `check` raises again at the
beginning and the end of every step.

Python calls no handler during code in another language. The handler runs when that code returns.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# SIGHUP does not exist on Windows.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# A second signal within this time is the same request, for example if a shell and a parent process both send it.
_SAME_REQUEST_SECONDS = 1.0

_received: list[int] = []
_last_received = 0.0
# Signal that interrupted the last command.
_ended_by: int | None = None
_deferring = 0


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raises KeyboardInterrupt for a signal while the block runs in the main thread."""

    def interrupt(signum: int, frame: object) -> None:  # noqa: ARG001
        global _last_received
        is_repeated = bool(_received) and time.monotonic() - _last_received < _SAME_REQUEST_SECONDS
        _received.append(signum)
        _last_received = time.monotonic()
        if not _deferring and not is_repeated and not _is_importing_torch():
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    _received.clear()
    before = {}
    try:
        for signum in _handled() if in_main_thread else ():
            before[signum] = signal.signal(signum, interrupt)
        yield
    finally:
        global _ended_by
        _ended_by = received()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _received.clear()
        # After a KeyboardInterrupt in exec() of a text, as torch calls it, `python -m` ends by SIGINT instead of with
        # the exit code. The next exec() resets that.
        exec("")  # noqa: S102 - a constant


def exit_on_signal() -> None:
    """Installs handlers that end the process on a signal outside of a command.

    They apply while the program is imported, and after a command while Python ends. The process ends without a
    traceback and with the exit code of an interrupted command.
    """
    owner = os.getpid()

    def end(signum: int, frame: object) -> None:  # noqa: ARG001
        if os.getpid() != owner:  # a forked process
            os._exit(128 + signum)
        if _ended_by is None:
            with contextlib.suppress(OSError):
                os.write(2, b"Error: interrupted\n")
        os._exit(128 + (_ended_by or signum))

    for signum in _handled():
        signal.signal(signum, end)
    # Registered first, so it is called last. Python then restores the default actions, which would change the exit code
    # of a command that has printed its result.
    atexit.register(ignore)


def ignore() -> None:
    """Ignores the signals that end programs."""
    for signum in _handled():
        signal.signal(signum, signal.SIG_IGN)


def _handled() -> list[signal.Signals]:
    """Returns the signals to handle: those that the caller does not ignore.

    A shell ignores signals for background jobs.
    """
    return [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


def _is_importing_torch() -> bool:
    """Returns True during torch's import, because exceptions in its C++ code may abort."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def received() -> int | None:
    """Returns the first signal during the running command."""
    return _received[0] if _received else None


def ended_by() -> int | None:
    """Returns the first signal during the running or the last command."""
    return received() or _ended_by


def check() -> None:
    """Raises KeyboardInterrupt after a signal, even if the exception was swallowed.

    Raises:
        KeyboardInterrupt: A signal arrived during the running command.
    """
    if _received:
        raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Delays signals until the next `check`, for short steps that must be atomic."""
    global _deferring
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a temporary folder, and removes it even if a signal arrives meanwhile."""
    folder = tempfile.TemporaryDirectory()
    try:
        yield Path(folder.name)
    finally:
        with deferred():
            folder.cleanup()
    check()
