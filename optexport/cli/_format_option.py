"""The options that name formats, built in or of installed packages."""

from __future__ import annotations

from typing import Any

import click


def check_formats(context: click.Context, option: click.Parameter, value: Any) -> Any:  # noqa: ARG001 - click passes it
    """Checks the names of formats. Installed packages are read only now, which keeps --help fast."""
    from optexport.errors import did_you_mean
    from optexport.exporters.registry import list_formats

    for name in [value] if isinstance(value, str) else value or ():
        if name not in list_formats():
            raise click.BadParameter(f'unknown format "{name}". {did_you_mean(name, list_formats())}')
    return value
