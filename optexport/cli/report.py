"""The commands ``optexport report`` and ``optexport diff``."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import click

from optexport.bundle.layout import NO_ROOM
from optexport.cli._console import console, echo
from optexport.cli._group import Command, json_option, print_json
from optexport.errors import ConfigError

_HTML = re.compile(rb"(<!--.*?-->\s*)*<(!doctype\s+)?html\b", re.DOTALL | re.IGNORECASE)


def _write(path: Path, text: str, option: str) -> None:
    """Writes a file atomically, so that a full disk does not damage an earlier one."""
    whole = not path.is_relative_to("/dev") and (not path.exists() or path.is_file())  # neither a pipe nor a device
    written = path.resolve().with_name(f".{path.name}.{os.getpid()}") if whole else path
    try:
        try:
            written.write_text(text, encoding="utf-8")
            if whole:
                if path.exists():
                    shutil.copymode(path, written)
                written.replace(path.resolve())
        finally:
            if whole:
                written.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in NO_ROOM:
            error.filename = str(path)
            raise
        raise ConfigError(f"it cannot be written: {error}", location=f"{option} {path}") from error


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
    from optexport.bundle.digests import read_manifest
    from optexport.bundle.layout import MEASUREMENTS, REPORT, SIGNATURE, check_outside, check_overwritable
    from optexport.report.html import page

    if output is not None:
        check_outside("--output", output, [bundle])
        check_overwritable("--output", output, _HTML, "HTML file")
    manifest = read_manifest(bundle, report=False)
    ended = False
    if output is not None:
        _write(output, page.render(bundle, manifest), "--output")
    else:
        before = (bundle / MEASUREMENTS).read_bytes()  # contain the report's digest
        try:
            page.write(bundle)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ConfigError(
                f"it cannot be written: {error}", location=str(bundle / REPORT), hint="Name a file: --output FILE"
            ) from error
        ended = (bundle / SIGNATURE).exists() and (bundle / MEASUREMENTS).read_bytes() != before
    echo(f"Wrote {output or bundle / REPORT}")
    if ended:
        echo(f"The signature is of the earlier one. To sign it anew: optexport sign {bundle} --key PRIVATE.pem")


@click.command(cls=Command)
@click.argument("one", metavar="A", type=click.Path(path_type=Path, file_okay=False))
@click.argument("other", metavar="B", type=click.Path(path_type=Path, file_okay=False))
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the comparison to an HTML file.")
@json_option
def diff(one: Path, other: Path, html: Path | None, as_json: bool) -> None:
    """Say how the bundles A and B differ.

    First whether they compute the same; then their configs, versions, rules, parity, sizes and times.
    """
    from optexport.bundle.layout import check_outside, check_overwritable
    from optexport.report.html import difference, page

    if html is not None:
        check_outside("--html", html, [one, other])
        check_overwritable("--html", html, _HTML, "HTML file")
    found = difference.compare(difference.read_side(one), difference.read_side(other))
    if html is not None:
        _write(html, page.render_difference(found), "--html")
    if as_json:
        print_json(difference.as_json(found))
    else:
        difference.show(found, console())
