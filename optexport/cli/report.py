"""The command ``optexport report``, which writes the report of a bundle again."""

from __future__ import annotations

import errno
from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command
from optexport.errors import ConfigError


@click.command(cls=Command, examples=["optexport report build/my-model -o report.html"])
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write (default: report.html in the bundle).",
)
def report(bundle: Path, output: Path | None) -> None:
    """Write the HTML report of BUNDLE again.

    Use this after an upgrade, to get the newest report for an older bundle, or to write the report to another place.
    The report is one file without external resources: the checks, the changes of the graph, files, and times.
    """
    from optexport.bundle.digests import read_manifest
    from optexport.bundle.layout import MEASUREMENTS, REPORT, SIGNATURE
    from optexport.cli import _html_file
    from optexport.report.html import page

    if output is not None:
        _html_file.check_target("output", output, [bundle])
    manifest = read_manifest(bundle, report=False)
    is_signature_outdated = False
    if output is not None:
        _html_file.write(output, page.render(bundle, manifest), "output")
    else:
        before = (bundle / MEASUREMENTS).read_bytes()  # contain the report's digest
        try:
            page.write(bundle)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ConfigError(
                f"cannot write the file: {error}",
                location=str(bundle / REPORT),
                hint="Write the report to another place: --output FILE",
            ) from error
        is_signature_outdated = (bundle / SIGNATURE).exists() and (bundle / MEASUREMENTS).read_bytes() != before
    echo(f"Wrote {output or bundle / REPORT}")
    if is_signature_outdated:
        echo("The signature of the bundle is invalid now, because the report changed. To sign the bundle again:")
        echo(f"  optexport sign {bundle} --key PRIVATE.pem")
