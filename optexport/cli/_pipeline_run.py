"""Runs the pipeline for ``optexport run`` and ``optexport export``, and the options that both have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import console, stdout_to_stderr
from optexport.cli._group import json_option, junit_option, no_custom_code_option, print_json
from optexport.cli._option_names import name_options
from optexport.errors import OptexportError
from optexport.report.progress import show_progress

if TYPE_CHECKING:
    from optexport.config.schema import Config

without_option = click.option("--without", multiple=True, metavar="RULE", help="Leave this rule out. May be repeated.")
tune_option = click.option(
    "--tune",
    is_flag=True,
    help="Spend 5 minutes, or tune.budget, on a search for the fastest rules and format passes of each file.",
)
baseline_option = click.option(
    "--baseline", is_flag=True, help="Also write the plain export, without rules and format passes, to OUTPUT-baseline."
)
dump_option = click.option(
    "--dump",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the graph before and after every rule to this folder.",
)
verbose_option = click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="Also list the rules that matched nothing, the format passes, and the names of the cases.",
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Do not show the steps.")


def pipeline_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that change what a run does."""
    return without_option(tune_option(baseline_option(dump_option(command))))


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for safety and for what a run prints and writes besides its bundle."""
    return no_custom_code_option(junit_option(quiet_option(verbose_option(json_option(command)))))


@contextlib.contextmanager
def publish_errors(title: str, junit: Path | None) -> Iterator[None]:
    """Writes an error to the job's page on GitHub and to the JUnit file.

    Args:
        title: The name of the config.
        junit: The file of ``--junit``.
    """
    from optexport.report import github
    from optexport.report import junit as report_junit

    try:
        yield
    except OptexportError as error:
        name_options(error)
        github.publish(title, None, error)
        report_junit.write(junit, None, error)
        raise


def run_config(
    config: Config,
    path: Path,
    text: str | None = None,
    *,
    title: str,
    junit: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Runs a config, and prints and publishes the result.

    Args:
        config: The config, to count the steps.
        path: The config file; paths in the config start at its folder.
        text: The config, if it is in no file.
        title: The name of the config on GitHub.
        junit: The file of ``--junit``.
        options: The fields of `optexport.pipeline.plan.RunOptions`.

    Raises:
        OptexportError: The run fails, or the model is exported but its tracking failed.
    """
    from optexport.config.run_steps import list_run_steps
    from optexport.report import github
    from optexport.report import junit as report_junit
    from optexport.tracking import tracking_process

    without, baseline = options.get("without", ()), bool(options.get("baseline"))
    steps = None if options.get("tune") else list_run_steps(config, without, baseline=baseline)
    with (
        publish_errors(title, junit),
        show_progress(not quiet) as progress,
        tracking_process(config.tracking) as tracker,
    ):
        if steps is not None:
            progress.count.expect(["import libraries", *steps])
        with progress.step("import libraries"):
            from optexport.pipeline.plan import RunOptions, plan_run
            from optexport.pipeline.run import run_plan
            from optexport.report import json_document, terminal
            from optexport.report.gate_limits import list_gate_limits

        # A model's own code may print; standard output is reserved for the result.
        with stdout_to_stderr():
            result = run_plan(plan_run(path, RunOptions(**options), text), progress, tracker)
    github.publish(title, result.manifest.parity, result.failure, result)
    report_junit.write(junit, result.manifest.parity, result.failure, list_gate_limits(result))
    if as_json:
        print_json(json_document.as_json(result))
    else:
        terminal.show(result, console(), verbose=verbose)
    if result.failure is not None:
        raise result.failure
