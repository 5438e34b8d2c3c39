"""The process of one config. It is forked from one that has imported all this, which took seconds, and once."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

# What a run imports, and a fork has from the start.
import optexport.pipeline
import optexport.summary  # noqa: F401
from optexport.cli.main import main
from optexport.tracking.store import import_mlflow

import_mlflow()
gc.freeze()  # so that no collection writes to pages that forks share


def run(arguments: Sequence[str], document: str, log: str, environment: dict[str, str]) -> None:
    """Runs a command of optexport's as a program of its own would.

    Args:
        document: The file that takes what the command prints.
        log: The file that takes what it and its libraries say meanwhile.
        environment: That of the one who asks; that of the process which is forked may be older.
    """
    os.setsid()  # so that it can be ended with all that it starts
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in ((0, os.devnull), (1, document), (2, log)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - to the end
    sys.argv = ["optexport", *arguments]
    main()
