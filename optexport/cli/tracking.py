"""The commands ``optexport upload``, ``promote`` and ``rollback``, which use MLflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, key_option, outcome, print_json
from optexport.errors import ConfigError

if TYPE_CHECKING:
    from optexport.config.schema import Config

_CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A config that names the store in its [tracking].",
)
_URI = click.option("--uri", help="The store; by default that of --config, or MLFLOW_TRACKING_URI.")
_ALIAS = click.option("--alias", help='By default that of --config, or "champion".')


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@_URI
@_CONFIG
@click.option("--experiment", help="By default that of the config.")
@key_option
@json_option
def upload(
    bundle: Path, uri: str | None, config: Path | None, experiment: str | None, key: Path | None, as_json: bool
) -> None:
    """Send BUNDLE to MLflow, if it is not there yet.

    The run that could not send it is completed, and the model registered, if the bundle's config says so. Nothing is
    proven again: what others made is believed, but for --key.
    """
    read = _read(config)
    store = _store(uri, config, read)
    if key is not None:
        from optexport.bundle.signing import signature

        signature.check(bundle, key)
    from optexport.tracking.resume import log_bundle

    experiment = experiment or (None if read is None else read.tracking.experiment)
    done = log_bundle(bundle, store, experiment, Path() if config is None else config.parent)
    failed = None if done.registered is None else done.registered.failure
    if as_json:
        print_json({**outcome(failed), **asdict(done)})
    else:
        echo(f"{bundle}: {'was there already' if done.before else 'sent'}, MLflow run {done.run_id}")
        for line in [*done.page.splitlines(), *([] if done.registered is None else [done.registered.summary])]:
            echo(f"  {line}")
    if failed is not None:
        raise failed


def _moves(command: Callable[..., None]) -> Callable[..., None]:
    for option in (_ALIAS, _URI, _CONFIG, json_option):
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("name")
@click.argument("version")
@_moves
def promote(name: str, version: str, alias: str | None, uri: str | None, config: Path | None, as_json: bool) -> None:
    """Give the alias of NAME to VERSION, whatever its figures.

    NAME is that of MLflow's registry.
    """
    read = _read(config)
    from optexport.tracking.registry import promotion

    alias = _alias(alias, read)
    before = promotion.promote(_store(uri, config, read), name, version, alias)
    _tell({"name": name, "alias": alias, "version": version, "before": before}, as_json)


@click.command(cls=Command)
@click.argument("name")
@_moves
def rollback(name: str, alias: str | None, uri: str | None, config: Path | None, as_json: bool) -> None:
    """Give the alias of NAME back to the version before.

    NAME is that of MLflow's registry; the version is the last one that held the alias.
    """
    read = _read(config)
    from optexport.tracking.registry import promotion

    alias = _alias(alias, read)
    before, version = promotion.rollback(_store(uri, config, read), name, alias)
    _tell({"name": name, "alias": alias, "version": version, "before": before}, as_json)


def _tell(moved: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(moved)
        return
    before = f", which version {moved['before']} held" if moved["before"] not in (None, moved["version"]) else ""
    echo(f"{moved['name']} version {moved['version']} holds {moved['alias']}{before}.")


def _read(config: Path | None) -> Config | None:
    from optexport.config.load import load_config

    return None if config is None else load_config(config)


def _alias(given: str | None, config: Config | None) -> str:
    from optexport.config.registration import DEFAULT_ALIAS, alias_name

    if given is not None:
        try:
            return alias_name(given)
        except ValueError as error:
            raise ConfigError(str(error), location="--alias") from error
    return DEFAULT_ALIAS if config is None or config.registering is None else config.registering.alias


def _store(uri: str | None, path: Path | None, config: Config | None) -> str:
    if uri is None and path is not None and config is not None:
        from optexport.tracking.store import resolved_uri

        return resolved_uri(config.tracking.uri, path.parent)
    from optexport.config import tracking_uri

    try:
        found = tracking_uri.check_uri(uri) if uri else tracking_uri.find_environment_uri()
    except ValueError as error:
        raise ConfigError(str(error), location="--uri") from error
    if found is None:
        raise ConfigError(
            "nothing says which MLflow is meant",
            location="--uri",
            hint="Give --uri URI, --config CONFIG, or set MLFLOW_TRACKING_URI.",
        )
    return found
