"""The engine that runs a batch on a Ray cluster."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optexport._utils.extras import check_extra
from optexport.batch.ray_package import brought_home, check_portable, packed, run_there
from optexport.batch.results import TaskResult, not_run
from optexport.batch.run import Engine
from optexport.batch.supervisor import Limits, attempts
from optexport.batch.tasks import Task
from optexport.errors import ConfigError
from optexport.pipeline.lockfile import named_files

# What the head of a cluster has to answer.
_ANSWER_SECONDS = 10.0
# What the nodes have to end what they are at, and to clean up.
_CLEAN_SECONDS = 20.0
# How often the cluster starts a task again whose node was lost.
_LOST_NODES = 5
# So many configs are on their way for each CPU, and no more: the others' weights wait on the disk.
_WAITING = 2
# What a run takes beside its model, and how many times the model, as was seen of small ones; Ray reserves as much.
_BESIDE_BYTES, _TIMES = 2 << 30, 6


def on_ray(address: str | None, limits: Limits, memory: int | None) -> Engine:
    """Runs configs on a cluster, as many at a time as it has room for; without an address on one of this machine.

    Args:
        memory: Bytes that Ray reserves for each; by default by the size of its model.
    """
    return functools.partial(_run, address, limits, memory)


def _run(
    address: str | None, limits: Limits, memory: int | None, tasks: Sequence[Task], folder: Path
) -> Iterator[tuple[Task, TaskResult]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without it Ray warns of accelerators, which nobody here asked for.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    check_extra("ray", "--engine ray")
    import ray

    for task in tasks:
        if task.config is not None:
            check_portable(task)
    try:
        _check_address(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no cluster answers: {error}", location=f"--address {address}") from error
    pending: dict[Any, Task] = {}
    try:
        remote = ray.remote(num_cpus=1, max_retries=_LOST_NODES)(run_there)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        most = _WAITING * max(1, int(sum(node.get("CPU", 0) for node in nodes)))
        room = int(max(node.get("memory", 0) for node in nodes))
        for task in tasks:
            if task.config is None:  # a mistake in a config is told here
                yield task, attempts(task, limits, folder, threading.Event())
                continue
            if len(pending) == most:
                yield _next(ray, pending, folder)
            # What no node has Ray would wait for without end.
            try:
                options = {"memory": min(room, memory or _needed(task)), "name": task.name}
                parcel = packed(task)
            except OSError as error:
                yield task, not_run(task, error)
                continue
            pending[remote.options(**options).remote(parcel, limits)] = task
        while pending:
            yield _next(ray, pending, folder)
    finally:
        try:
            _interrupt(ray, list(pending))
        finally:
            ray.shutdown()


def _interrupt(ray: Any, pending: list[Any]) -> None:
    """Has the nodes end what they are at, where a batch is interrupted, and waits until they have cleaned up."""
    for reference in pending:
        ray.cancel(reference)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=_CLEAN_SECONDS)


def _check_address(address: str | None) -> None:
    """Raises an OSError at once where Ray would try without end."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()


def _next(ray: Any, pending: dict[Any, Task], folder: Path) -> tuple[Task, TaskResult]:
    """Waits for one of those that are at work, and brings home what came of it."""
    (ready,), _ = ray.wait(list(pending), num_returns=1)
    task = pending.pop(ready)
    try:
        found = ray.get(ready)
    except Exception as error:  # of Ray's: the node is lost for good, or memory ran out
        return task, TaskResult(task.name, str(task.path), task.digest, 1, f"the cluster did not run it: {error}")
    try:
        return task, brought_home(task, folder, found)
    except OSError as error:
        return task, not_run(task, error)


def _needed(task: Task) -> int:
    """Bytes that a run may take, as far as the files of its model tell."""
    assert task.config is not None
    return _BESIDE_BYTES + _TIMES * sum(
        path.stat().st_size for _, path in named_files(task.config, task.path.parent) if path.is_file()
    )
