"""The command ``optexport batch``, which runs many configs."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import console, echo, stdout_to_stderr
from optexport.cli._group import Command, json_option, print_json


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
    type=click.FloatRange(0.1, 2**20),
    metavar="GIB",
    help="Memory limit of each config (default: an equal share of the free memory).",
)
@click.option(
    "--timeout",
    default="1h",
    show_default=True,
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
    metavar="FILTER",
    help="Run CONFIG for the newest version of each registered model that matches this MLflow filter.",
)
@json_option
def batch(
    configs: tuple[str, ...],
    from_registry: str | None,
    jobs: int | None,
    engine: str,
    address: str | None,
    memory: float | None,
    timeout: str,
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
    from optexport.batch.run import run_batch

    # Standard output is reserved for the result.
    with stdout_to_stderr():
        result = run_batch(
            configs,
            jobs=jobs,
            engine=engine,
            address=address,
            memory=memory,
            timeout=timeout,
            retries=retries,
            resume=resume,
            folder=folder,
            from_registry=from_registry,
            progress=True,
        )
    if as_json:
        print_json(result.as_json())
    else:
        result.show(console())
    for failure in result.tracking_failures:
        echo(f"Tracking failed: {failure}", err=True)
    click.get_current_context().exit(result.exit_code)
