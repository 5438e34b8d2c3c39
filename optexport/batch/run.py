"""Runs many configs, each in its own process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from optexport._utils.paths import as_path
from optexport._utils.platform import free_memory
from optexport.batch.engine import Engine, run_tasks
from optexport.batch.from_registry import write_configs
from optexport.batch.local import local_engine
from optexport.batch.results import TaskResult
from optexport.batch.summary import BatchResult, columns, format_line, metrics
from optexport.batch.supervisor import Limits
from optexport.batch.tasks import Task, find_tasks
from optexport.config.batch import BatchOptions
from optexport.config.benchmarks import parse_duration
from optexport.config.validation import explain_errors
from optexport.errors import ConfigError, OptexportError
from optexport.report.progress import choose_printer
from optexport.tracking.batch import BatchRun, batch_run
from optexport.tracking.store import resolved_uri

_Path = str | os.PathLike[str]


def run_batch(  # noqa: PLR0913 - options of the public API
    configs: _Path | Sequence[_Path],
    *,
    jobs: int | None = None,
    engine: str = "local",
    address: str | None = None,
    memory: float | None = None,
    timeout: str = "1h",
    retries: int = 1,
    resume: bool = False,
    folder: _Path = "optexport-batch",
    from_registry: str | None = None,
    progress: bool | None = None,
) -> BatchResult:
    """Runs many configs, each in its own process, like ``optexport batch``.

    A config that crashes, hangs or needs too much memory does not affect the others.

    Args:
        configs: Config files and glob patterns.
        jobs: The number of configs that run at the same time; 1 by default.
        engine: "local" runs on this machine, "ray" on a Ray cluster.
        address: The address of the Ray cluster; by default, one is started on this machine.
        memory: The memory limit of each config, in GiB; by default an equal share of the free memory.
        timeout: The time limit of each config, such as "90s", "5m" or "1h".
        retries: The number of retries after a crash or a timeout.
        resume: Whether to skip configs that succeeded in an earlier batch with this folder.
        folder: The folder for the logs and the journal of results.
        from_registry: A filter of MLflow's registered models. The only config is a template, which runs for the newest
            version of each model that matches; versions that were exported before are skipped.
        progress: Whether to print a line for every result on standard error; by default in notebooks and at prompts.

    Returns:
        The result of every config. A failed config raises no error; see `BatchResult.passed`.

    Raises:
        ConfigError: An argument is invalid, no file matches, or two configs have the same output.
        TrackingError: The registry cannot be reached.
    """
    options = _check_options(
        jobs=jobs,
        engine=engine,
        address=address,
        memory=memory,
        timeout=timeout,
        retries=retries,
        resume=resume,
        from_registry=from_registry,
    )
    names = [str(path) for path in _as_paths(configs)]
    logs = as_path(folder, "batch: folder")
    if not names:
        raise ConfigError("there is no config to run", location="batch: configs", hint="Give a file or a pattern.")
    if from_registry is not None and len(names) != 1:
        raise ConfigError(f"a registry needs exactly one config, found {len(names)}", location="batch: from_registry")
    selection = None if from_registry is None else write_configs(Path(names[0]), from_registry)
    tasks = find_tasks(names if selection is None else list(selection.versions))
    failures: list[OptexportError] = []
    print_line = choose_printer(progress)

    def announce(result: TaskResult) -> None:
        print_line(format_line(result))
        if selection is not None:
            try:
                selection.mark_exported(result)
            except OptexportError as error:  # the batch continues with the other configs
                failures.append(error)

    chosen_engine = _create_engine(options)
    with _start_tracking(tasks, print_line) as parent:
        results = run_tasks(tasks, chosen_engine, logs, resume=resume, announce=announce)
        if selection is not None:
            results = [*selection.failures, *results]
        parent.table, parent.metrics = columns(results), metrics(results)
        failed = sum(result.exit_code != 0 for result in results)
        parent.reason = f"{failed} of {len(results)} configs failed" if failed else None
    if parent.failure is not None:
        failures.append(parent.failure)
    empty = None if selection is None or results else selection.describe_empty()
    return BatchResult(tuple(results), parent.run_id, tuple(failures), empty, parent.page)


def _as_paths(configs: object) -> list[Path]:
    if isinstance(configs, Iterable) and not isinstance(configs, str | bytes):
        return [as_path(path, "batch: configs") for path in configs]
    return [as_path(configs, "batch: configs")]


def _check_options(**options: object) -> BatchOptions:
    try:
        checked = BatchOptions.model_validate(options)
    except ValidationError as error:
        raise explain_errors(error, BatchOptions, "batch") from error
    if checked.engine == "ray" and checked.jobs is not None:
        raise ConfigError(
            "a Ray cluster decides itself how many configs it runs",
            location="batch: jobs",
            hint="Leave it out, or use the local engine.",
        )
    if checked.engine != "ray" and checked.address is not None:
        raise ConfigError("an address needs the engine ray", location="batch: address")
    return checked


def _create_engine(options: BatchOptions) -> Engine:
    memory = None if options.memory is None else int(options.memory * 2**30)
    seconds = parse_duration(options.timeout)
    if options.engine == "ray":
        from optexport.batch.ray_engine import ray_engine  # needs an extra

        return ray_engine(options.address, Limits(memory or sys.maxsize, seconds, options.retries), memory)
    jobs = options.jobs or 1
    return local_engine(jobs, Limits(memory or free_memory() // jobs, seconds, options.retries))


def _start_tracking(
    tasks: Sequence[Task], print_line: Callable[[str], None]
) -> contextlib.AbstractContextManager[BatchRun]:
    """Starts the MLflow run of a batch, if all its tracked configs use the same store."""
    tracked = [(task.config, task.path) for task in tasks if task.config is not None and task.config.tracking.enabled]
    stores = {resolved_uri(config.tracking.store, path.parent) for config, path in tracked}
    if len(stores) > 1:
        print_line(f"No MLflow run is written for the batch, because its configs use {len(stores)} MLflow stores.")
    if len(stores) != 1:
        return contextlib.nullcontext(BatchRun())
    config, path = tracked[0]
    return batch_run(config.tracking, path, len(tasks))
