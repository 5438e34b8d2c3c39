"""The command ``optexport reproduce``, which exports a bundle again and compares it."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo, stdout_to_stderr
from optexport.cli._group import Command, key_option, no_custom_code_option
from optexport.errors import ParityError


@click.command(cls=Command, examples=["optexport reproduce build/my-model --folder ."])
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="The folder that paths in the config start from (default: the working directory).",
)
@key_option
@no_custom_code_option
def reproduce(bundle: Path, folder: Path, key: Path | None) -> None:
    """Export the model of BUNDLE again and compare the files.

    Use this to check that a bundle was built from the source that it names. It repeats the run in a temporary folder,
    with the rules and passes that tuning chose. The exit code is 4 if any file of the manifest differs in a byte; the
    message names what differs.

    It runs the code that the manifest names. Check a bundle of somebody else with --key, or use --no-custom-code.
    """
    from optexport._utils import packages
    from optexport.bundle import digests
    from optexport.bundle.sign import check_signature

    check_signature(bundle, key)
    packages.check(digests.read_manifest(bundle).versions)  # before the slow import of torch, as in optexport lock
    from optexport.pipeline import reproduce as pipeline_reproduce

    with stdout_to_stderr():
        differing = pipeline_reproduce.reproduce(bundle, folder, progress=True)
    if differing:
        details = "\n".join(differing)
        hint = pipeline_reproduce.find_hint(bundle)
        message = "the repeated export differs from the bundle"
        raise ParityError(message, location=str(bundle), details=details, hint=hint)
    echo(f"{bundle}: reproduced, every file of the manifest is identical")
