"""``optexport lock``: what a config's result depends on, written down beside it."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo, prints_aside, show_progress
from optexport.cli._group import Command


@click.command(cls=Command)
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
def lock(config: Path) -> None:
    """Pin packages, model and files of CONFIG, for run --locked.

    Loads the model. What is written, CONFIG.lock, belongs in version control beside the config.
    """
    from optexport._utils import packages
    from optexport.config.load import load_config

    read, folder = load_config(config), config.parent
    packages.check()
    with show_progress(quiet=False) as progress:
        from optexport._utils import signals
        from optexport.job import rules_of
        from optexport.pipeline import lockfile, run

        with prints_aside(), signals.temporary_folder() as scratch:
            rules = rules_of(read, folder, ())  # as a run does: they too import what lies beside the config
            job = run.prepare(read, folder, rules, scratch / "bundle", scratch, progress)
            made = lockfile.make(job, folder, packages.versions())
    path = lockfile.write(made, config)
    versions_held = len(made.versions) + len(made.imports)
    counts = f"{versions_held} versions, files: {len(made.files)}, packages of the model: {len(made.packages)}"
    echo(f"Wrote {path}: the model's weights, {counts}. Then:")
    echo(f"  optexport run --locked {config}")
