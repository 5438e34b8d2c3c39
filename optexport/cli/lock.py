"""The command ``optexport lock``, which pins the inputs of a config."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo, stdout_to_stderr
from optexport.cli._group import Command


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

    load_config(config)
    packages.check()  # before the slow import of torch, which may even fail for a package of another version
    from optexport.pipeline import lock as locking
    from optexport.pipeline import lockfile

    with stdout_to_stderr():
        path = locking.lock(config, progress=True)
    pins = lockfile.read(config)
    files = f"{len(pins.files)} {'file' if len(pins.files) == 1 else 'files'}"
    echo(f"Wrote {path} ({len(pins.versions)} versions, {files}, the weights). Now run:")
    echo(f"  optexport run --locked {config}")
