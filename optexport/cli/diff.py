"""The command ``optexport diff``, which compares two bundles."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import console
from optexport.cli._group import Command, json_option, print_json


@click.command(cls=Command, examples=["optexport diff build/my-model build/other --html difference.html"])
@click.argument("bundle_a", metavar="A", type=click.Path(path_type=Path))
@click.argument("bundle_b", metavar="B", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write an HTML page to this file.")
@click.option("--layers", is_flag=True, help="Also run the ONNX files of both and compare their values layer by layer.")
@json_option
def diff(bundle_a: Path, bundle_b: Path, html: Path | None, layers: bool, as_json: bool) -> None:
    """Compare the bundles A and B.

    Use this after a change of the model, the config or a version. It says first whether both bundles compute the same.
    Tables then show what differs in configs, versions, rules, errors, gates, file sizes and latencies. A file in a
    bundle stands for the bundle.

    The exit code is 0 whether or not the bundles differ, and 4 if one of them is damaged.
    """
    from optexport.cli import _html_file
    from optexport.pipeline import diff as bundle_diff
    from optexport.report.html import page

    if html is not None:
        _html_file.check_target("html", html, [bundle_a, bundle_b])
    result = bundle_diff.diff(bundle_a, bundle_b, layers=layers)
    if html is not None:
        _html_file.write(html, page.render_difference(result), "html")
    if as_json:
        print_json(result.as_json())
    else:
        result.show(console())
