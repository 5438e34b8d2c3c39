"""The command ``optexport schema``, which prints the JSON schema of configs."""

from __future__ import annotations

import json

import click

from optexport.cli._group import Command


@click.command(cls=Command, examples=["optexport schema > optexport.schema.json"])
def schema() -> None:
    """Print the JSON schema of configs.

    Use this for completion and checks in an editor. Save the schema next to the config, and start the config with
    the line: #:schema optexport.schema.json
    """
    from optexport.config.json_schema import config_schema

    click.echo(json.dumps(config_schema(), indent=2))
