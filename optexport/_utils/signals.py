"""Signals that end the program: none is lost, and none leaves a folder half removed or half renamed.

The handler raises KeyboardInterrupt, which Python swallows where it is raised in a finaliser. So the signal is also
remembered, and looked for wherever a stage begins or ends.

Python calls no handler while code that is not its own runs, which a file of somebody else's may make run for ever. So a
thread waits for signals too, and ends the process where the main thread does not come to answer one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

# For the main thread to answer a signal: less than the 10 seconds after which containers are killed.
_PATIENCE_SECONDS = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A signal that comes so soon after another is the same request, as of a shell and of a program that runs this one.
_AT_ONCE_SECONDS = 1.0

_received: list[int] = []
_moments: list[float] = []
# The signal that ended the last command, of which its message told.
_told: int | None = None
_deferring = 0
_temporary: set[str] = set()
# What else is told, and where, of a process that is ended with an exit code.
last_words: Callable[[int], tuple[int, str]] = lambda code: (1, "")  # noqa: E731
# The file descriptors by which Python tells the threads that wait.
_watching: list[int] = []


@contextmanager
def heeded() -> Iterator[None]:
    """Within it, signals that end the program raise KeyboardInterrupt; in the main thread, which alone has handlers."""

    answered: list[int] = []

    def stop(signum: int, frame: object) -> None:  # noqa: ARG001
        moment = time.monotonic()
        again = bool(_received) and moment - _moments[-1] < _AT_ONCE_SECONDS
        _received.append(signum)
        _moments.append(moment)
        answered.append(signum)
        if _is_starting():
            _end(signum)
        if not _deferring and not again:
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    _received.clear()
    _moments.clear()
    before = {signum: signal.signal(signum, stop) for signum in (_heard() if in_main_thread else ())}
    try:
        with _watched(answered) if in_main_thread else contextlib.nullcontext():
            yield
    finally:
        global _told
        _told = received()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _received.clear()
        # Once KeyboardInterrupt has passed through exec() of a text, as torch calls it, `python -m` ends itself by
        # SIGINT in place of any exit code; the next exec() undoes that.
        exec("")  # noqa: S102 - no text of anyone else


@contextmanager
def _watched(answered: list[int]) -> Iterator[None]:
    """Within it, a signal that nobody answers ends the process.

    Args:
        answered: Filled by whoever answers; no event, for whose lock a handler that interrupts itself would wait.
    """
    told, tells = socket.socketpair()
    tells.setblocking(False)
    before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    _watching.append(tells.fileno())
    threading.Thread(target=_watch, args=(told, answered), daemon=True).start()
    try:
        yield
    finally:
        answered.append(0)
        with contextlib.suppress(ValueError):  # a process that was forked has forgotten it
            _watching.remove(tells.fileno())
        signal.set_wakeup_fd(before)
        tells.close()  # which ends the thread


def _is_starting() -> bool:
    """Whether torch is being imported: an exception in the middle of that may abort it, and nothing is done before."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _watch(told: socket.socket, answered: list[int]) -> None:
    with told:
        while sent := told.recv(1):
            if sent[0] not in _ENDING:
                continue
            patience = time.monotonic() + _PATIENCE_SECONDS
            while not answered:
                if time.monotonic() > patience and not _deferring:
                    _end(sent[0])
                time.sleep(0.1)


def _end(signum: int) -> NoReturn:
    """Ends the process without the main thread. Drafts of bundles are left to the next run, as after a SIGKILL."""
    for folder in list(_temporary):
        shutil.rmtree(folder, ignore_errors=True)
    for descriptor, text in ((2, "Error: interrupted\n"), last_words(128 + signum)):
        with contextlib.suppress(OSError):
            os.write(descriptor, text.encode())
    os._exit(128 + signum)


def end_at_once() -> None:
    """Has a signal end the process where no command heeds it: before one, and after, while Python ends.

    There an exception would be printed as a traceback, and take the place of the exit code.
    """
    owner = os.getpid()

    def end(signum: int, frame: object) -> None:  # noqa: ARG001
        if os.getpid() != owner:  # a process that was forked
            os._exit(128 + signum)
        if _told is not None:
            os._exit(128 + _told)
        _end(signum)

    for signum in _heard():
        signal.signal(signum, end)
    atexit.register(_ignore)  # as the first, so that it is called last


def _ignore() -> None:
    """Python gives signals their default action back as it ends, which takes a while, and all is done and told."""
    for signum in _heard():
        signal.signal(signum, signal.SIG_IGN)


def _heard() -> list[signal.Signals]:
    """The signals that whoever started the program has not told it to ignore, as a shell does of jobs behind it."""
    return [signum for signum in _ENDING if signal.getsignal(signum) is not signal.SIG_IGN]


def _unwatched() -> None:
    """What a process that was forked does: its signals are none of its parent's, whose thread would be told of them."""
    if _watching:
        signal.set_wakeup_fd(-1)
        _watching.clear()


os.register_at_fork(after_in_child=_unwatched)


def received() -> int | None:
    """The first signal that came, if one did."""
    return _received[0] if _received else None


def ended_by() -> int | None:
    """The first signal of the command that is ending, or ended last."""
    return received() or _told


def check() -> None:
    """Raises KeyboardInterrupt where a signal came, though what it raised may have been swallowed."""
    if _received:
        raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Within it, a signal waits: for what must not be done by halves, and takes no time."""
    global _deferring
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, also where a signal comes while it is removed."""
    folder = tempfile.TemporaryDirectory()
    _temporary.add(folder.name)
    try:
        yield Path(folder.name)
    finally:
        with deferred():
            folder.cleanup()
            _temporary.discard(folder.name)
    check()
