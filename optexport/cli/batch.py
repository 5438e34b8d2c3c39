"""The command ``optexport batch``, which runs many configs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import console, echo, prints_aside
from optexport.cli._group import Command, json_option, print_json
from optexport.config.benchmarks import parse_duration
from optexport.errors import OptexportError

if TYPE_CHECKING:
    from optexport.batch.results import TaskResult
    from optexport.batch.run import Engine
    from optexport.batch.tasks import Task

# Limits of --memory in GiB: less than an idle process needs, or more than any machine has, is a typing error.
_GIB = (0.1, 2**20)


def _seconds(context: click.Context, option: click.Parameter, given: str) -> int:  # noqa: ARG001 - click's
    try:
        return parse_duration(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _bytes(context: click.Context, option: click.Parameter, given: float | None) -> int | None:  # noqa: ARG001 - click's
    if given is None:
        return None
    if not _GIB[0] <= given <= _GIB[1]:  # also false for NaN
        raise click.BadParameter(f"{given:g} is not in the range {_GIB[0]}<=x<={_GIB[1]}.")
    return int(given * 2**30)


@click.command(cls=Command)
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option("--jobs", type=click.IntRange(1, 1024), help="How many run at a time on this machine; by default 1.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where they run: on this machine, or on a Ray cluster.",
)
@click.option("--address", help="The Ray cluster; by default one of this machine's own.")
@click.option(
    "--memory",
    type=float,
    callback=_bytes,
    metavar="GIB",
    help="What each may take; by default an equal share of what is free.",
)
@click.option(
    "--timeout", default="1h", show_default=True, callback=_seconds, metavar="TIME", help='As "90s", "5m" or "1h".'
)
@click.option(
    "--retries",
    type=click.IntRange(0, 100),
    default=1,
    show_default=True,
    help="How often one is tried again that crashed or took too long.",
)
@click.option("--resume", is_flag=True, help="Leave out what ended well in an earlier batch of this folder.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("optexport-batch"),
    show_default=True,
    help="Takes logs, and the journal of what ended.",
)
@click.option(
    "--from-registry",
    "query",
    metavar="FILTER",
    help="Run CONFIG for the newest version of each registered model that this filter of MLflow's finds.",
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
    """Run every CONFIG, in processes of their own.

    A CONFIG is a file, or a glob. One that crashes, hangs, or takes too much memory takes no other with it. The exit
    code is that of the worst. With --from-registry there is one CONFIG, in which {name} and {version} stand for those
    of a model; versions that have a bundle are left out.
    """
    from optexport.batch import from_registry, summary
    from optexport.batch.run import run
    from optexport.batch.tasks import find_tasks

    _check_options(configs, query, engine, jobs, address)
    asked = None if query is None else from_registry.write_configs(Path(configs[0]), query)
    tasks = find_tasks(configs if asked is None else list(asked.versions))
    failures: list[OptexportError] = []

    def tell(ended: TaskResult) -> None:
        echo(summary.format_line(ended), err=True)
        if asked is not None:
            try:
                asked.mark_exported(ended)
            except OptexportError as error:  # the batch continues with the other configs
                failures.append(error)

    chosen = _engine(engine, address, jobs or 1, memory, timeout, retries)
    # Standard output is reserved for the result.
    with _tracked(tasks) as parent, prints_aside():
        ended = run(tasks, chosen, folder, resume=resume, announce=tell)
        if asked is not None:
            ended = [*asked.failures, *ended]
        if parent is not None:
            parent.table, parent.metrics = summary.columns(ended), summary.metrics(ended)
            failed = sum(each.exit_code != 0 for each in ended)
            parent.reason = f"{failed} of {len(ended)} configs failed" if failed else None
    if parent is not None and parent.failure is not None:
        failures.append(parent.failure)
    document = summary.as_json(ended, None if parent is None else parent.run_id, failures)
    if as_json:
        print_json(document)
    else:
        if asked is not None and not ended:
            echo(asked.describe_empty())
        else:
            summary.print_table(ended, console())
        if parent is not None and parent.run_id is not None:
            echo(f"MLflow run {parent.run_id} holds those of all.")
    for failure in failures:
        echo(f"Not tracked: {failure}", err=True)
    click.get_current_context().exit(document["exit_code"])


def _check_options(
    configs: tuple[str, ...], query: str | None, engine: str, jobs: int | None, address: str | None
) -> None:
    if query is not None and len(configs) > 1:
        raise click.UsageError("--from-registry takes one CONFIG.")
    if engine == "ray" and jobs is not None:
        raise click.UsageError("--jobs is of this machine; a cluster runs as many as it has room for.")
    if engine != "ray" and address is not None:
        raise click.UsageError("--address is that of a cluster: give --engine ray too.")


def _engine(engine: str, address: str | None, jobs: int, memory: int | None, seconds: int, retries: int) -> Engine:
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

    stores = {resolved_uri(task.config.tracking.uri, task.path.parent) for task in tracked if task.config is not None}
    first = tracked[0]
    assert first.config is not None
    if len(stores) > 1:
        echo(f"The configs track in {len(stores)} stores, so no MLflow run holds them all.", err=True)
        return contextlib.nullcontext()
    return batch_run(first.config.tracking, first.path, len(tasks))
