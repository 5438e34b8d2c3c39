"""The command ``optexport rollback``, which moves an alias back."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._group import Command, json_option
from optexport.cli._tracking_options import (
    alias_option,
    choose_alias,
    choose_store,
    config_option,
    read_config,
    uri_option,
)
from optexport.cli.promote import show_move


@click.command(cls=Command, examples=["optexport rollback my-model --uri http://127.0.0.1:5000"])
@click.argument("name")
@alias_option
@uri_option
@config_option
@json_option
def rollback(name: str, alias: str | None, uri: str | None, config_path: Path | None, as_json: bool) -> None:
    """Move the alias of a registered model back.

    Use this if a new version turns out to be bad. NAME is the name of the model in MLflow's registry. The alias moves
    to the version that had it before. A second rollback goes one more version back.
    """
    config = read_config(config_path)
    from optexport.tracking.registry import promotion

    alias = choose_alias(alias, config)
    before, version = promotion.rollback(name, choose_store(uri, config_path, config), alias=alias)
    show_move(name, alias, before, version, as_json=as_json)
