"""``optexport reproduce``: a bundle made again."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from optexport.cli.console import echo, progress
from optexport.cli.group import Command, no_code_option
from optexport.errors import ParityError


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="What paths in its config are relative to; by default this folder.",
)
@no_code_option
def reproduce(bundle: Path, folder: Path) -> None:
    """Make BUNDLE again, and say what differs.

    Runs what the manifest says, with what a tuning chose, in a temporary folder. Exit code 4 where any file is not the
    same to the byte.
    """
    with progress(quiet=False) as stages:
        from optexport.bundle import reproduction

        with contextlib.redirect_stdout(sys.stderr):
            differing = reproduction.reproduce(bundle, folder, stages)
    if differing:
        told = "".join(f"\n  {line}" for line in differing)
        raise ParityError(f"made again, it is not the same{told}", place=str(bundle))
    echo(f"{bundle}: made again, every file is the same to the byte.")
