"""Batch engine for a Ray cluster.

The configs and the files that they name travel as the working directory of Ray's runtime environment. Results come back
as return values. This machine uploads the bundles, because a node may not reach the MLflow server.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optexport._utils import atomic_dir
from optexport._utils.extras import check_extra
from optexport._utils.packages import versions
from optexport.batch.engine import Engine
from optexport.batch.results import TaskResult, make_failed_result
from optexport.batch.supervisor import Limits, log_name, supervise
from optexport.batch.tasks import Task, find_tasks
from optexport.bundle import layout
from optexport.bundle.parts import read_bundles
from optexport.config.schema import Config
from optexport.errors import ConfigError, OptexportError, TrackingError
from optexport.generation.export import check_output
from optexport.pipeline.lockfile import named_files
from optexport.tracking.run import LATER_VARIABLE
from optexport.tracking.store import resolved_uri
from optexport.tracking.upload import upload_locked

# Seconds for the head of a cluster to answer.
_CONNECT_SECONDS = 10.0
# Seconds for the nodes to end their attempts and remove temporary files after an interrupt.
_CLEANUP_SECONDS = 20.0
# Number of times that the cluster restarts a task whose node was lost.
_NODE_RETRIES = 5
# Memory that Ray reserves for a config by default: this, plus a multiple of the size of its files.
_BASE_MEMORY, _MEMORY_MULTIPLE = 2 << 30, 6
# Ray's limit for a working directory. https://docs.ray.io/en/latest/ray-core/handling-dependencies.html
_MAX_PACKAGE_BYTES = 500 << 20
# Environment variables that affect the bytes of a bundle, or the code that may run.
_VARIABLES = ("OMP_NUM_THREADS", "OPTEXPORT_NO_CUSTOM_CODE", "HF_HUB_OFFLINE", "HF_ENDPOINT")


@dataclass(frozen=True)
class RemoteTask:
    """A config in the working directory of a node.

    Attributes:
        config: Path relative to the working directory.
        versions: Versions of the packages that affect the files.
    """

    config: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class RemoteResult:
    """Result of a config on a node.

    Attributes:
        task_result: Result of the task, with paths on the node.
        files: Content of the bundle and of the folders next to it, by path relative to the parent of the output.
        logs: Content by suffix.
        log: Path of the logs on the node, without suffix.
        root: The working directory on the node; None if the node refused the config.
    """

    task_result: TaskResult
    files: Mapping[str, bytes]
    logs: Mapping[str, bytes]
    log: str = ""
    root: str | None = None


def ray_engine(address: str | None, limits: Limits, memory: int | None) -> Engine:
    """Returns an engine that runs as many configs in parallel as the cluster can hold.

    Args:
        address: The cluster; None starts one on this machine.
        memory: Bytes that Ray reserves for each config; by default estimated from the size of its files.
    """
    return functools.partial(_run, address, limits, memory)


def _run(
    address: str | None, limits: Limits, memory: int | None, tasks: Sequence[Task], folder: Path
) -> Iterator[tuple[Task, TaskResult]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray warns about accelerators.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The working directory contains only files that a config names, and all of them are needed.
    os.environ.setdefault("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    check_extra("ray", "`engine=ray`")
    import ray

    for task in tasks:
        if task.config is not None:
            check_portable(task)
    invalid = [task for task in tasks if task.config is None]
    if invalid:  # the CLI reports the mistake in a config
        with supervise(limits, folder, threading.Event()) as supervisor:
            for task in invalid:
                yield task, supervisor.run(task)
    with tempfile.TemporaryDirectory(prefix="optexport-ray-") as temporary:
        remote_tasks, failures = stage_tasks(tasks, Path(temporary))
        yield from failures
        try:
            _check_address(address)
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False,
                runtime_env={"working_dir": temporary, "env_vars": _environment()},
            )
        except (OSError, ValueError, RuntimeError) as error:
            location = "`engine=ray`" if address is None else f"`address={address}`"
            raise ConfigError(f"no Ray cluster answers: {error}", location=location) from error
    yield from _run_on_nodes(ray, remote_tasks, limits, memory, folder)


def _run_on_nodes(
    ray: Any, remote_tasks: Sequence[tuple[Task, RemoteTask]], limits: Limits, memory: int | None, folder: Path
) -> Iterator[tuple[Task, TaskResult]]:
    pending: dict[Any, Task] = {}
    try:
        remote = ray.remote(num_cpus=1, max_retries=_NODE_RETRIES)(run_on_node)
        # Ray would wait forever for a node with more memory than any node has.
        largest = int(max(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]))
        for task, remote_task in remote_tasks:
            options = {"memory": min(largest, memory or _estimate_memory(task)), "name": task.name}
            pending[remote.options(**options).remote(remote_task, limits)] = task
        while pending:
            yield _next(ray, pending, folder)
    finally:
        try:
            _interrupt(ray, list(pending))
        finally:
            ray.shutdown()


def check_portable(task: Task) -> None:
    """Checks that the output of a config is relative to the config.

    Raises:
        ConfigError: The output is an absolute path.
    """
    assert task.config is not None
    if Path(task.config.export.output).expanduser().is_absolute():
        raise ConfigError(
            "the output is an absolute path, but the nodes of a cluster have other folders",
            location=f"{task.name}: export.output",
            hint="Use a path relative to the config.",
        )


def stage_tasks(
    tasks: Sequence[Task], folder: Path
) -> tuple[list[tuple[Task, RemoteTask]], list[tuple[Task, TaskResult]]]:
    """Links the configs and the files that they name into a folder.

    Returns:
        The tasks for the nodes, and the tasks whose files cannot be read.

    Raises:
        ConfigError: The files exceed Ray's limit.
    """
    staged: list[tuple[Task, list[Path]]] = []
    failures: list[tuple[Task, TaskResult]] = []
    for task in tasks:
        if task.config is not None:
            try:
                staged.append((task, _relative_files(task)))
            except OSError as error:
                failures.append((task, make_failed_result(task, error)))
    paths = sorted({path for _, files in staged for path in files})
    size = sum(path.stat().st_size for path in paths)
    if size > _MAX_PACKAGE_BYTES:
        limit = _MAX_PACKAGE_BYTES >> 20
        raise ConfigError(
            f"the files that the configs name are too large for Ray (expected at most {limit}, found {size >> 20} MiB)",
            location="`engine=ray`",
            hint="Put large files on storage that every node can read, and name them by absolute paths.",
        )
    if not staged:
        return [], failures
    outputs = [task.output.parent for task, _ in staged if task.output is not None]
    root = Path(os.path.commonpath([*(path.parent for path in paths), *outputs]))
    for path in paths:
        link = folder / path.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    here = versions()
    return [(task, RemoteTask(str(task.path.relative_to(root)), here)) for task, _ in staged], failures


def _relative_files(task: Task) -> list[Path]:
    """Returns the config, and the files that it names by relative paths."""
    assert task.config is not None
    named = named_files(task.config, task.path.parent)
    files = [task.path, *(path for name, path in named if not Path(name).expanduser().is_absolute())]
    for path in files:
        path.stat()
    return [Path(os.path.abspath(path)) for path in files]


def _environment() -> dict[str, str]:
    """Returns the environment variables of the nodes."""
    return {**{name: os.environ[name] for name in _VARIABLES if name in os.environ}, LATER_VARIABLE: "1"}


def run_on_node(remote_task: RemoteTask, limits: Limits) -> RemoteResult:
    """Runs a config in the working directory of a node.

    Args:
        remote_task: The config.
        limits: Limits of the config.
    """
    here, expected = versions(), remote_task.versions
    if here != expected:
        names = sorted(name for name in {*here, *expected} if here.get(name) != expected.get(name))
        differences = ", ".join(f"{name} {here.get(name)} (expected {expected.get(name)})" for name in names)
        error = f"the node has other package versions: {differences}"
        return RemoteResult(TaskResult("", "", "", ConfigError.exit_code, error), {}, {})
    root = Path.cwd()
    (task,) = find_tasks([str(root / remote_task.config)])
    assert task.output is not None
    with tempfile.TemporaryDirectory(prefix="optexport-ray-") as temporary:
        logs = Path(temporary)
        with supervise(limits, logs, threading.Event()) as supervisor:
            result = supervisor.run(task)
        folders = [folder for folder in layout.output_folders(task.output) if folder.is_dir()]
        files = {
            path.relative_to(task.output.parent).as_posix(): path.read_bytes()
            for folder in folders
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        log_files = {path.suffix: path.read_bytes() for path in logs.iterdir()}
        return RemoteResult(result, files, log_files, str(logs / log_name(task)), str(root))


def collect(task: Task, folder: Path, remote_result: RemoteResult) -> TaskResult:
    """Writes the result of a node to the paths that a local run would use.

    Args:
        task: The config.
        folder: Folder for the logs.
        remote_result: Result of the node, with logs, failure and bundle.
    """
    assert task.output is not None and task.config is not None
    result, root = remote_result.task_result, remote_result.root
    error = result.error
    if error is not None and root is not None:
        error = error.replace(remote_result.log, str(folder / log_name(task))).replace(f"{root}/", "")
    result = replace(result, config=task.name, path=str(task.path), digest=task.digest, output=None, error=error)
    for suffix, content in remote_result.logs.items():
        (folder / f"{log_name(task)}{suffix}").write_bytes(content)
    with tempfile.TemporaryDirectory() as temporary:
        received = Path(temporary)
        for name, content in remote_result.files.items():
            (received / name).parent.mkdir(parents=True, exist_ok=True)
            (received / name).write_bytes(content)
        try:
            for target in layout.output_folders(task.output):
                if target != task.output and (received / target.name).is_dir():
                    shutil.copytree(received / target.name, target, dirs_exist_ok=True)
            bundle = received / task.output.name
            if bundle.is_dir():
                with contextlib.ExitStack() as lock:  # holds the lock until the bundle is uploaded
                    _write_bundle(bundle, task.output, task.config, lock)
                    result = replace(result, output=str(task.output))
                    return _track(result, task.output, task.config, task.path.parent)
        except OptexportError as failure:
            return replace(result, exit_code=failure.exit_code, error=str(failure))
    return result


def _write_bundle(received: Path, output: Path, config: Config, lock: contextlib.ExitStack) -> None:
    read_bundles(received)  # raises if the bundle is incomplete
    output.parent.mkdir(parents=True, exist_ok=True)
    check = layout.check_replaceable if config.generation is None else check_output
    with atomic_dir.drafting(output, check, lock) as draft:
        shutil.copytree(received, draft, dirs_exist_ok=True)


def _track(result: TaskResult, output: Path, config: Config, folder: Path) -> TaskResult:
    """Uploads a locked bundle to MLflow."""
    if not config.tracking.enabled or result.exit_code:
        return result
    try:
        uri = resolved_uri(config.tracking.store, folder)
        uploads = [upload_locked(bundle, uri, config.tracking.experiment, folder) for bundle in read_bundles(output)]
    except TrackingError as error:
        return replace(result, exit_code=error.exit_code, error=str(error))
    registrations = [upload.registered for upload in uploads if upload.registered is not None]
    failures = [registration.failure for registration in registrations if registration.failure is not None]
    if failures:
        return replace(result, exit_code=failures[0].exit_code, error=str(failures[0]), run_id=uploads[0].run_id)
    return replace(result, run_id=uploads[0].run_id)


def _interrupt(ray: Any, pending: list[Any]) -> None:
    """Cancels the tasks of an interrupted batch, and waits until the nodes have cleaned up."""
    for reference in pending:
        ray.cancel(reference)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=_CLEANUP_SECONDS)


def _check_address(address: str | None) -> None:
    """Raises an OSError if the address does not answer, because Ray would try forever."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _next(ray: Any, pending: dict[Any, Task], folder: Path) -> tuple[Task, TaskResult]:
    """Waits for the next task to end, and collects its result."""
    (ready,), _ = ray.wait(list(pending), num_returns=1)
    task = pending.pop(ready)
    try:
        result = ray.get(ready)
    except Exception as error:  # an error of Ray: the node is permanently lost, or out of memory
        return task, TaskResult(
            task.name, str(task.path), task.digest, 1, f"the cluster did not run the config: {error}"
        )
    try:
        return task, collect(task, folder, result)
    except OSError as error:
        return task, make_failed_result(task, error)


def _estimate_memory(task: Task) -> int:
    """Estimates the memory of a run in bytes from the size of the files in its config."""
    assert task.config is not None
    sizes = [path.stat().st_size for _, path in named_files(task.config, task.path.parent) if path.is_file()]
    return _BASE_MEMORY + _MEMORY_MULTIPLE * sum(sizes)
