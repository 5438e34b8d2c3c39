"""The process of one config, and the one that guards it. Both are forked from one that has imported all this once."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

# What a run imports, and a fork has from the start.
import optexport.pipeline
import optexport.summary  # noqa: F401 - for the forks
from optexport.batch import processes
from optexport.cli.main import main
from optexport.tracking.store import import_mlflow

import_mlflow()
gc.freeze()  # so that no collection writes to pages that forks share

# Of <linux/prctl.h>.
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
_EVERY_SECONDS = 0.01


def run(arguments: Sequence[str], document: str, log: str, environment: dict[str, str]) -> None:
    """Runs a command of optexport's in a process of its own, and ends as that does, with none and no file of it left.

    Processes below it whose parents have ended come to this one, though they be of another session, and are ended.
    Its folder for temporary files is its own, and goes.

    Args:
        document: The file that takes what the command prints.
        log: The file that takes what it and its libraries say meanwhile.
        environment: That of the one who asks; that of the process which is forked may be older.
    """
    os.setsid()  # what a terminal sends is for the batch
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing, open(log, "w") as said:
        for descriptor, file in ((0, nothing), (1, said), (2, said)):
            os.dup2(file.fileno(), descriptor)
    tempfile.tempdir = None  # that of the environment from now on
    temporary = tempfile.mkdtemp(prefix="optexport-attempt-")
    libc = ctypes.CDLL(None)
    libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
        _run(arguments, document)
    else:
        code = _guard(pid)
        shutil.rmtree(temporary, ignore_errors=True)  # what one that was killed has left there
        _end_as(code)


def _run(arguments: Sequence[str], document: str) -> None:
    """Runs a command as a program of its own would; what code in C prints at the same place goes to the log."""
    sys.stdin, sys.stdout, sys.stderr = open(0), open(document, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - to the end
    sys.argv = ["optexport", *arguments]
    main()


def _guard(pid: int) -> int:
    """Waits for the end of a process, and ends all that it has left; its exit code, or minus the signal it died of."""
    signal.signal(signal.SIGTERM, lambda *_: processes.tell(pid, signal.SIGTERM))
    threading.Thread(target=_end_with_the_batch, args=(pid,), daemon=True).start()
    while (ended := os.wait())[0] != pid:
        pass  # one that was left by its parent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while _are_left():
        processes.end(processes.below(os.getpid()))
        time.sleep(_EVERY_SECONDS)
    return os.waitstatus_to_exitcode(ended[1])


def _end_as(code: int) -> NoReturn:
    """Ends this process as another one did."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # there is one of the other
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _are_left() -> bool:
    """Whether any process is below this one, by what the system says when it waits for one."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _end_with_the_batch(pid: int) -> None:
    """Ends the process where the batch is killed: nobody would watch it."""
    batch = multiprocessing.parent_process()
    assert batch is not None
    batch.join()
    processes.tell(pid, signal.SIGKILL)
