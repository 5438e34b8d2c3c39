"""The engine that runs a batch on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from optexport.batch.results import TaskResult, not_run
from optexport.batch.run import Engine
from optexport.batch.supervisor import Limits, attempts, make_ready
from optexport.batch.tasks import Task


def here(jobs: int, limits: Limits) -> Engine:
    """Runs so many configs side by side."""
    return functools.partial(_run, jobs, limits)


def _run(jobs: int, limits: Limits, tasks: Sequence[Task], folder: Path) -> Iterator[tuple[Task, TaskResult]]:
    stop = threading.Event()
    with threads_shared(jobs), ThreadPoolExecutor(jobs) as pool:
        make_ready()
        futures = {pool.submit(attempts, task, limits, folder, stop): task for task in tasks}
        try:
            for future in as_completed(futures):
                task = futures[future]
                try:
                    ended = future.result()
                except Exception as error:  # of the file system, or of multiprocessing: the others go on
                    ended = not_run(task, error)
                yield task, ended
        finally:
            stop.set()  # where the batch is interrupted, what is at work ends, and what waits is not begun
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def threads_shared(jobs: int) -> Iterator[None]:
    """Shares the machine's cores among so many processes; a user's own setting stays."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
