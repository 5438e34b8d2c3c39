"""Batch engine for this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from optexport._utils.platform import usable_cores
from optexport.batch.engine import Engine
from optexport.batch.results import TaskResult, make_failed_result
from optexport.batch.supervisor import Limits, supervise
from optexport.batch.tasks import Task


def local_engine(jobs: int, limits: Limits) -> Engine:
    """Returns an engine that runs up to `jobs` configs in parallel."""
    return functools.partial(_run, jobs, limits)


def _run(jobs: int, limits: Limits, tasks: Sequence[Task], folder: Path) -> Iterator[tuple[Task, TaskResult]]:
    stop = threading.Event()
    with (
        shared_cores(jobs),
        supervise(limits, folder, stop) as supervisor,
        ThreadPoolExecutor(jobs) as pool,
    ):
        futures = {pool.submit(supervisor.run, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                task = futures[future]
                try:
                    result = future.result()
                except Exception as error:  # an OSError of one config must not stop the others
                    result = make_failed_result(task, error)
                yield task, result
        finally:
            stop.set()  # after an interrupt, running attempts end, and waiting tasks do not start
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def shared_cores(jobs: int) -> Iterator[None]:
    """Sets ``OMP_NUM_THREADS`` to the cores of one process, unless the user has set it.

    The processes of a batch then share the machine without competing for cores.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // jobs))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
