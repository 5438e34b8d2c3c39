"""``python -m optexport``, and the console script."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from optexport._utils import signals

# For threads that a model's code started to end by themselves, once the command is done.
_PATIENCE_SECONDS = 10.0


def main() -> None:
    """Runs the command line; what it is made of is imported once a signal can no longer leave a traceback there."""
    signals.exit_on_signal()
    leave = os._exit
    _never_end_as_if_done()
    _keep_descriptors()
    from optexport.cli.main import main as program

    try:
        program()
    except SystemExit as ended:
        threading.Thread(target=_end_anyway, args=(leave, ended.code), daemon=True).start()
        raise
    finally:
        _end_output()


def _end_anyway(leave: Callable[[int], NoReturn], code: object) -> None:
    """Ends the process where Python would wait for ever for a thread that a model's code left running."""
    time.sleep(_PATIENCE_SECONDS)
    waited_for = [thread for thread in threading.enumerate() if not thread.daemon]
    left = ", ".join(ascii(thread.name) for thread in waited_for if thread is not threading.main_thread())
    if left:
        with contextlib.suppress(OSError):
            os.write(2, f"Ended, though a model's code left threads running: {left}\n".encode())
        leave(code if isinstance(code, int) else int(code is not None))


def _keep_descriptors() -> None:
    """Has no file of ours take the place of an input or output that is closed."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def _end_output() -> None:
    """Has what a model's code prints as Python ends go to standard error: our result is whole."""
    try:
        sys.stdout.flush()
        os.dup2(2, 1)
    except OSError:  # nobody reads it, or its disk is full, which was told; Python would end with a code of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ValueError, AttributeError):  # it was closed
        pass


def _never_end_as_if_done() -> None:
    """Has ``os._exit(0)``, which only a model's code calls here, end the process with 1: 0 means that all is done."""
    owner, leave = os.getpid(), os._exit

    def exit_as_failed(status: int) -> NoReturn:
        if status == 0 and os.getpid() == owner:  # and not a process that was forked
            os.write(2, b"Error: a model's code ended the program\n")
            status = 1
        leave(status)

    os._exit = exit_as_failed


if __name__ == "__main__":  # and not where multiprocessing imports it to start a process
    main()
