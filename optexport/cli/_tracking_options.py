"""Options that the commands for MLflow share, and the store that they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from optexport.errors import ConfigError

if TYPE_CHECKING:
    from optexport.config.schema import Config

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A config whose [tracking] names the MLflow store.",
)
uri_option = click.option("--uri", help="The MLflow store (default: from --config, or MLFLOW_TRACKING_URI).")
alias_option = click.option("--alias", help="The alias (default: from --config, or champion).")


def read_config(path: Path | None) -> Config | None:
    """Loads the config of ``--config``, if the option is set.

    Raises:
        ConfigError: The config is invalid.
    """
    from optexport.config.load import load_config

    return None if path is None else load_config(path)


def choose_alias(option: str | None, config: Config | None) -> str:
    """Returns the alias of ``--alias``, of the config, or the default.

    Raises:
        ConfigError: MLflow does not allow the alias.
    """
    from optexport.config.registration import DEFAULT_ALIAS, alias_name

    if option is not None:
        try:
            return alias_name(option)
        except ValueError as error:
            raise ConfigError(str(error), location="--alias") from error
    return DEFAULT_ALIAS if config is None or config.registering is None else config.registering.alias


def choose_store(option: str | None, config_path: Path | None, config: Config | None) -> str:
    """Returns the URI of ``--uri``, of the config, or of the environment.

    Raises:
        ConfigError: The URI is invalid, or nothing sets one.
    """
    if option is None and config_path is not None and config is not None:
        from optexport.tracking.store import resolved_uri

        return resolved_uri(config.tracking.store, config_path.parent)
    from optexport.config.tracking_uri import find_uri

    return find_uri(option, "--uri", "Give --uri URI or --config CONFIG, or set MLFLOW_TRACKING_URI.")
