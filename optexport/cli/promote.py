"""The command ``optexport promote``, which moves an alias to a version."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, print_json
from optexport.cli._tracking_options import (
    alias_option,
    choose_alias,
    choose_store,
    config_option,
    read_config,
    uri_option,
)


@click.command(cls=Command, examples=["optexport promote my-model 3 --uri http://127.0.0.1:5000"])
@click.argument("name")
@click.argument("version")
@alias_option
@uri_option
@config_option
@json_option
def promote(
    name: str, version: str, alias: str | None, uri: str | None, config_path: Path | None, as_json: bool
) -> None:
    """Move the alias of a registered model to VERSION.

    Use this to release a version yourself. NAME is the name of the model in MLflow's registry. The version is not
    compared with the current one, unlike a run with [register], which moves the alias only if the new version is not
    worse.

    To undo it: optexport rollback NAME, with the same --uri or --config
    """
    config = read_config(config_path)
    from optexport.tracking.registry import promotion

    alias = choose_alias(alias, config)
    before = promotion.promote(name, version, choose_store(uri, config_path, config), alias=alias)
    show_move(name, alias, before, version, as_json=as_json)


def show_move(name: str, alias: str, before: str | None, version: str, *, as_json: bool) -> None:
    """Prints where an alias was and is, as text or as JSON."""
    if as_json:
        print_json({"name": name, "alias": alias, "version": version, "before": before})
    elif before in (None, version):
        echo(f"{name}: {alias} is version {version}")
    else:
        echo(f"{name}: {alias} moved from version {before} to version {version}")
