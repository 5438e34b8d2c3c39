"""The command ``optexport run``, which exports the model of a config."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from optexport.cli._console import console, stdout_to_stderr
from optexport.cli._group import Command, print_json
from optexport.cli._pipeline_run import output_options, pipeline_options, publish_errors, run_config
from optexport.errors import ConfigError
from optexport.report.progress import show_progress


@click.command(
    cls=Command,
    examples=[
        "optexport run optexport.toml",
        "optexport run optexport.toml --tune --junit parity.xml",
    ],
)
@click.argument("config", type=click.Path(path_type=Path))
@pipeline_options
@click.option("--locked", is_flag=True, help="Refuse to run if anything differs from CONFIG.lock (optexport lock).")
@output_options
def run(
    config: Path,
    without: tuple[str, ...],
    tune: bool,
    baseline: bool,
    dump: Path | None,
    locked: bool,
    junit: Path | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Export the model in CONFIG and verify the files.

    Use this to build a bundle. It loads the model, traces it, applies the transformations, and exports the files. It
    compares the graph and every file with the original model, and tracks the run in MLflow unless the config disables
    that.

    If a check fails, an earlier bundle is not changed, and OUTPUT-failure has a script that reproduces the failure.
    """
    from optexport._utils import packages
    from optexport.bundle.layout import output_folders
    from optexport.config.load import load_config
    from optexport.pipeline import lockfile
    from optexport.report import junit as report_junit

    try:
        loaded_config = load_config(config, without)  # reports mistakes in the config before the slow import of torch
        if locked and loaded_config.generation is None:  # reports packages that transformers would refuse at import
            lockfile.check_environment(lockfile.read(config), loaded_config, config, packages.versions())
        packages.check()
    except ConfigError:
        report_junit.start(junit, [config])
        with publish_errors(config.name, junit):
            raise
    report_junit.start(junit, [config, *output_folders(loaded_config.output_path(config.parent))])
    if loaded_config.generation is not None:
        options = {"--tune": tune, "--baseline": baseline, "--dump": dump, "--locked": locked, "--junit": junit}
        _check_generation_options(option for option, value in options.items() if value)
        _run_generation(config, without, quiet=quiet, verbose=verbose, as_json=as_json)
        return
    run_config(
        loaded_config,
        config,
        title=config.name,
        junit=junit,
        quiet=quiet,
        verbose=verbose,
        as_json=as_json,
        without=without,
        tune=tune,
        baseline=baseline,
        dump=dump,
        locked=locked,
    )


def _check_generation_options(options: Iterable[str]) -> None:
    for option in options:
        raise ConfigError(
            "this option does not work for a config with [generation]",
            location=option,
            hint=f"Run the config without {option}.",
        )


def _run_generation(config: Path, without: tuple[str, ...], *, quiet: bool, verbose: bool, as_json: bool) -> None:
    """Exports the parts of a generative model, and prints their results."""
    with show_progress(not quiet) as progress:
        from optexport.generation import run

        with stdout_to_stderr():
            result = run.run_generation(config, without=without, progress=progress)
    if as_json:
        print_json(result.as_json())
    else:
        result.show(console(), verbose=verbose)
    for part in result.parts.values():
        if part.failure is not None:
            raise part.failure
