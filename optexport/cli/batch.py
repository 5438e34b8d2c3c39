"""The command ``optexport batch``, which runs many configs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import console, echo, stdout_to_stderr
from optexport.cli._group import Command, json_option, print_json
from optexport.errors import OptexportError

if TYPE_CHECKING:
    from optexport.batch.results import TaskResult
    from optexport.batch.run import Engine
    from optexport.batch.tasks import Task

# Limits of --memory in GiB: less than an idle process needs, or more than any machine has, is a typing error.
_GIB = (0.1, 2**20)


def _seconds(context: click.Context, option: click.Parameter, value: str) -> int:  # noqa: ARG001 - click's
    from optexport.config.benchmarks import parse_duration  # keeps --help fast

    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _bytes(context: click.Context, option: click.Parameter, value: float | None) -> int | None:  # noqa: ARG001 - click's
    if value is None:
        return None
    if not _GIB[0] <= value <= _GIB[1]:  # also false for NaN
        raise click.BadParameter(f"{value:g} is not in the range {_GIB[0]}<=x<={_GIB[1]}.")
    return int(value * 2**30)


@click.command(
    cls=Command,
    examples=[
        "optexport batch configs/*.toml --jobs 2",
        "optexport batch configs/*.toml --resume",
    ],
)
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option(
    "--jobs",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Number of configs that run at the same time (default: 1).",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Run on this machine, or on a Ray cluster.",
)
@click.option("--address", help="Address of the Ray cluster (default: start one on this machine).")
@click.option(
    "--memory",
    type=float,
    callback=_bytes,
    metavar="GIB",
    help="Memory limit of each config (default: an equal share of the free memory).",
)
@click.option(
    "--timeout",
    default="1h",
    show_default=True,
    callback=_seconds,
    metavar="TIME",
    help="Time limit of each config, such as 90s, 5m or 1h.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 100),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of retries after a crash or a timeout.",
)
@click.option("--resume", is_flag=True, help="Skip configs that succeeded in an earlier batch with this --folder.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("optexport-batch"),
    show_default=True,
    help="Folder for the logs and the journal of results.",
)
@click.option(
    "--from-registry",
    "query",
    metavar="FILTER",
    help="Run CONFIG for the newest version of each registered model that matches this MLflow filter.",
)
@json_option
def batch(
    configs: tuple[str, ...],
    query: str | None,
    jobs: int | None,
    engine: str,
    address: str | None,
    memory: int | None,
    timeout: int,
    retries: int,
    resume: bool,
    folder: Path,
    as_json: bool,
) -> None:
    """Run many configs, each in its own process.

    Use this to export several models in one call. CONFIG is a file or a glob pattern. A config that crashes, hangs or
    needs too much memory does not affect the others. The exit code is 0 if all succeed, and otherwise the one of the
    worst failure.

    With --from-registry, give one CONFIG as a template. Its {name} and {version} are replaced for each registered
    model. Versions that were exported before are skipped.
    """
    from optexport.batch import from_registry, summary
    from optexport.batch.run import run
    from optexport.batch.tasks import find_tasks

    _check_options(configs, query, engine, jobs, address)
    selection = None if query is None else from_registry.write_configs(Path(configs[0]), query)
    tasks = find_tasks(configs if selection is None else list(selection.versions))
    failures: list[OptexportError] = []

    def announce(result: TaskResult) -> None:
        echo(summary.format_line(result), err=True)
        if selection is not None:
            try:
                selection.mark_exported(result)
            except OptexportError as error:  # the batch continues with the other configs
                failures.append(error)

    batch_engine = _create_engine(engine, address, jobs or 1, memory, timeout, retries)
    # Standard output is reserved for the result.
    with _tracked(tasks) as parent, stdout_to_stderr():
        results = run(tasks, batch_engine, folder, resume=resume, announce=announce)
        if selection is not None:
            results = [*selection.failures, *results]
        if parent is not None:
            parent.table, parent.metrics = summary.columns(results), summary.metrics(results)
            failed = sum(result.exit_code != 0 for result in results)
            parent.reason = f"{failed} of {len(results)} configs failed" if failed else None
    if parent is not None and parent.failure is not None:
        failures.append(parent.failure)
    document = summary.as_json(results, None if parent is None else parent.run_id, failures)
    if as_json:
        print_json(document)
    else:
        if selection is not None and not results:
            echo(selection.describe_empty())
        else:
            summary.print_table(results, console())
        if parent is not None and parent.run_id is not None:
            echo(f"MLflow run of the batch: {parent.run_id}")
    for failure in failures:
        echo(f"Tracking failed: {failure}", err=True)
    click.get_current_context().exit(document["exit_code"])


def _check_options(
    configs: tuple[str, ...], query: str | None, engine: str, jobs: int | None, address: str | None
) -> None:
    if query is not None and len(configs) > 1:
        raise click.UsageError(f"--from-registry needs exactly one CONFIG (found {len(configs)}).")
    if engine == "ray" and jobs is not None:
        raise click.UsageError(
            "--jobs works with --engine local only: a Ray cluster decides itself how many configs it runs."
        )
    if engine != "ray" and address is not None:
        raise click.UsageError("--address needs --engine ray.")


def _create_engine(
    engine: str, address: str | None, jobs: int, memory: int | None, seconds: int, retries: int
) -> Engine:
    from optexport.batch.supervisor import Limits

    if engine == "ray":
        from optexport.batch.ray_engine import ray_engine

        return ray_engine(address, Limits(memory or sys.maxsize, seconds, retries), memory)
    from optexport._utils.platform import free_memory
    from optexport.batch.local import local_engine

    return local_engine(jobs, Limits(memory or free_memory() // jobs, seconds, retries))


def _tracked(tasks: list[Task]) -> contextlib.AbstractContextManager[Any]:
    """Starts the MLflow run of a batch, if all its configs use the same store."""
    tracked = [task for task in tasks if task.config is not None and task.config.tracking.enabled]
    if not tracked:
        return contextlib.nullcontext()
    from optexport.tracking.batch import batch_run
    from optexport.tracking.store import resolved_uri

    stores = {resolved_uri(task.config.tracking.store, task.path.parent) for task in tracked if task.config is not None}
    first = tracked[0]
    assert first.config is not None
    if len(stores) > 1:
        echo(f"No MLflow run is written for the batch, because its configs use {len(stores)} MLflow stores.", err=True)
        return contextlib.nullcontext()
    return batch_run(first.config.tracking, first.path, len(tasks))
