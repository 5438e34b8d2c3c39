"""The entry point of ``python -m optexport`` and of the console script."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from optexport._utils import signals

# How long threads of a model's code may continue after the command.
_THREAD_SECONDS = 10.0


def main() -> None:
    """Runs the command line; installs signal handlers before the slow imports."""
    signals.exit_on_signal()
    leave = os._exit
    _fail_early_exits()
    _open_standard_streams()
    from optexport.cli.main import main as program

    try:
        program()
    except SystemExit as exit_request:
        threading.Thread(target=_end_despite_threads, args=(leave, exit_request.code), daemon=True).start()
        raise
    finally:
        _end_output()
        gc.freeze()  # Python would look for garbage in a million objects before it ends, which takes seconds


def _end_despite_threads(leave: Callable[[int], NoReturn], code: object) -> None:
    """Ends the process if Python would wait forever for a thread of a model's code."""
    time.sleep(_THREAD_SECONDS)
    running = [thread for thread in threading.enumerate() if not thread.daemon]
    names = ", ".join(ascii(thread.name) for thread in running if thread is not threading.main_thread())
    if names:
        with contextlib.suppress(OSError):
            os.write(2, f"optexport ended, but the model's code left threads running: {names}\n".encode())
        leave(code if isinstance(code, int) else int(code is not None))


def _open_standard_streams() -> None:
    """Opens closed standard streams as /dev/null, so that no later file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _end_output() -> None:
    """Redirects the output of a model's exit handlers to standard error, after the result."""
    try:
        sys.stdout.flush()
        os.dup2(2, 1)
    except OSError:  # a closed pipe or full disk, reported already; Python would change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ValueError, AttributeError):  # standard output is closed
        pass


def _fail_early_exits() -> None:
    """Makes ``os._exit(0)`` exit with 1, because only a model's code calls it, before the end."""
    owner, leave = os.getpid(), os._exit

    def exit_as_failed(status: int) -> NoReturn:
        if status == 0 and os.getpid() == owner:  # not in forked processes
            os.write(2, b"Error: the model's code ended the program before the command was finished\n")
            status = 1
        leave(status)

    os._exit = exit_as_failed


if __name__ == "__main__":  # not when multiprocessing imports this module in a child
    main()
