"""The command ``optexport sign``, which signs a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    envvar="OPTEXPORT_SIGNING_KEY",
    required=True,
    show_envvar=True,
    help="The private key: a PEM file, without a password.",
)
def sign(bundle: Path, key: Path) -> None:
    """Sign BUNDLE, with a statement of where it comes from.

    Writes provenance.json, which says what went in and what came out; sbom.cdx.json, which says what is installed here;
    and bundle.sig, which is of every file. Of a generative model the folder of all parts is signed as a whole. A bundle
    that is signed already is signed anew.
    """
    from optexport.bundle.signing import signature

    signature.sign(bundle, key)
    echo(f"{bundle}: signed. Who has the public key checks it: optexport verify {bundle} --key PUBLIC.pem")
