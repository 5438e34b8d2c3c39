"""The process of one config. It is forked from one that has imported all this, which took seconds, and once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence

# What a run imports, and a fork has from the start.
import optexport.pipeline
import optexport.summary  # noqa: F401 - for the forks
from optexport.cli.main import main
from optexport.tracking.store import import_mlflow

import_mlflow()
gc.freeze()  # so that no collection writes to pages that forks share


def run(arguments: Sequence[str], document: str, log: str, environment: dict[str, str]) -> None:
    """Runs a command of optexport's as a program of its own would.

    What others print at the same place, as code in C does, goes to the log.

    Args:
        document: The file that takes what the command prints.
        log: The file that takes what it and its libraries say meanwhile.
        environment: That of the one who asks; that of the process which is forked may be older.
    """
    os.setsid()  # so that it can be ended with all that it starts
    threading.Thread(target=_end_with_the_batch, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing, open(log, "w") as said:
        for descriptor, file in ((0, nothing), (1, said), (2, said)):
            os.dup2(file.fileno(), descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(document, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - to the end
    sys.argv = ["optexport", *arguments]
    main()


def _end_with_the_batch() -> None:
    """Ends the process, and what it started, where the batch is killed: nobody would watch it."""
    batch = multiprocessing.parent_process()
    assert batch is not None
    batch.join()
    os.killpg(os.getpid(), signal.SIGKILL)
