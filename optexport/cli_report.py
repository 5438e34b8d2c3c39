"""``optexport report`` and ``optexport diff``: what bundles say of themselves, and how two of them differ."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli_group import Command
from optexport.errors import ConfigError


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}", place=f"{option} {path}") from error


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default report.html in the bundle.",
)
def report(bundle: Path, output: Path | None) -> None:
    """Write the report of BUNDLE again, as one HTML file.

    A bundle of an earlier version gets one so.
    """
    from optexport.bundle_files import read_manifest
    from optexport.html_report import page
    from optexport.places import REPORT, check_outside

    if output is not None:
        check_outside("--output", output, [bundle])
    manifest = read_manifest(bundle, report=False)
    if output is not None:
        _write(output, page.render(bundle, manifest), "--output")
    else:
        try:
            page.write(bundle)
        except PermissionError as error:
            raise ConfigError(
                f"it cannot be written: {error}", place=str(bundle / REPORT), mend="Name a file: --output FILE"
            ) from error
    click.echo(f"Wrote {output or bundle / REPORT}")
