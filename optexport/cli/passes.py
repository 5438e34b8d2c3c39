"""The command ``optexport passes``, which lists the format passes."""

from __future__ import annotations

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, print_json


@click.command(cls=Command, examples=["optexport passes"])
@json_option
def passes(as_json: bool) -> None:
    """List the format passes that a config can apply.

    Use this to choose the passes of [export.passes]. A format pass writes the same graph in a format in another way,
    which may be faster. run --tune tries them for you.
    """
    from optexport.exporters.registry import all_passes

    entries = list(all_passes())
    if as_json:
        print_json({entry.name: {"summary": entry.summary, "formats": list(formats)} for entry, formats in entries})
        return
    width = max(len(entry.name) for entry, _ in entries)
    for entry, formats in entries:
        echo(f"{entry.name:{width}}  {entry.summary} ({', '.join(formats)})")
