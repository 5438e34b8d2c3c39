"""Signals that end the program: none is lost, and none leaves a folder half removed or half renamed.

The handler raises KeyboardInterrupt, which Python swallows where it is raised in a finaliser. So the signal is also
remembered, and looked for wherever a stage begins or ends.
"""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_received: list[int] = []
_deferring = 0


@contextmanager
def heeded() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM raise KeyboardInterrupt; in the main thread, the only one that may set handlers."""

    def stop(signum: int, frame: object) -> None:  # noqa: ARG001
        _received.append(signum)
        if not _deferring:
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    _received.clear()
    before = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _received.clear()
        # Once KeyboardInterrupt has passed through exec() of a text, as torch calls it, `python -m` ends itself by
        # SIGINT in place of any exit code; the next exec() undoes that.
        exec("")  # noqa: S102 - no text of anyone else


def received() -> int | None:
    """The first signal that came, if one did."""
    return _received[0] if _received else None


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
    try:
        yield Path(folder.name)
    finally:
        with deferred():
            folder.cleanup()
    check()
