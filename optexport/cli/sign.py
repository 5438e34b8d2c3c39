"""The command ``optexport sign``, which signs a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command


@click.command(cls=Command, examples=["optexport sign build/my-model --key private.pem"])
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    envvar="OPTEXPORT_SIGNING_KEY",
    required=True,
    show_envvar=True,
    help="The private key, a PEM file without a password.",
)
def sign(bundle: Path, key: Path) -> None:
    """Sign BUNDLE and record how it was built.

    Use this before you hand a bundle to others, who check it with optexport verify --key. It writes provenance.json
    (the inputs and outputs of the build), sbom.cdx.json (the packages that are installed here) and bundle.sig (the
    signature of every file).

    An earlier signature is replaced. For a generative model, give the folder that has all parts.
    """
    from optexport.bundle import sign as signing

    signing.sign(bundle, key)
    echo(f"{bundle}: signed. To check the signature: optexport verify {bundle} --key PUBLIC.pem")
