"""The command ``optexport lock``, which pins the inputs of a config."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo, stdout_to_stderr
from optexport.cli._group import Command
from optexport.report.progress import show_progress


@click.command(cls=Command, examples=["optexport lock optexport.toml"])
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
def lock(config: Path) -> None:
    """Pin the versions, model and files that CONFIG uses.

    Use this to get the same bundle on another day or machine. It loads the model and writes CONFIG.lock, which has the
    versions of packages, the revision and digest of the model, and digests of files. Commit CONFIG.lock together with
    CONFIG, and run with: optexport run --locked CONFIG
    """
    from optexport._utils import packages
    from optexport.config.load import load_config

    loaded_config, folder = load_config(config), config.parent
    packages.check()
    with show_progress(True) as progress:
        from optexport._utils import signals
        from optexport.pipeline import lockfile, run
        from optexport.pipeline.plan import RunPlan
        from optexport.pipeline.rules import load_rules

        with stdout_to_stderr(), signals.temporary_folder() as scratch:
            rules = load_rules(
                loaded_config, folder, ()
            )  # as a run does, to import the rules' modules in the config's folder
            job = run.load_job(RunPlan(config, loaded_config, rules, scratch / "bundle"), scratch, progress)
            pins = lockfile.make_lock(job, folder, packages.versions())
    path = lockfile.write(pins, config)
    files = f"{len(pins.files)} {'file' if len(pins.files) == 1 else 'files'}"
    echo(f"Wrote {path} ({len(pins.versions)} versions, {files}, the weights). Now run:")
    echo(f"  optexport run --locked {config}")
