"""The command ``optexport reproduce``, which exports a bundle again and compares it."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo, prints_aside, show_progress
from optexport.cli._group import Command, key_option, no_custom_code_option
from optexport.errors import ParityError


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="What paths in its config are relative to; by default this folder.",
)
@key_option
@no_custom_code_option
def reproduce(bundle: Path, folder: Path, key: Path | None) -> None:
    """Make BUNDLE again, and say what differs.

    Runs what the manifest says, with what a tuning chose, in a temporary folder. Exit code 4 where any file is not the
    same to the byte. Runs the code that the manifest names: of a bundle of others check the signature first,
    with --key.
    """
    with show_progress(quiet=False) as progress:
        from optexport._utils import packages
        from optexport.bundle import digests

        if key is not None:
            from optexport.bundle.signing import signature

            signature.check(bundle, key)
        packages.check(digests.read_manifest(bundle).versions)
        from optexport.pipeline import reproduce as pipeline_reproduce

        with prints_aside():
            differing = pipeline_reproduce.reproduce(bundle, folder, progress)
    if differing:
        told = "".join(f"\n  {line}" for line in differing)
        raise ParityError(f"made again, it is not the same{told}", location=str(bundle))
    echo(f"{bundle}: made again, every file of its manifest is the same to the byte.")
