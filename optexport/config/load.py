"""Loads a config file and reports all its mistakes at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from optexport.config import text as config_text
from optexport.config.consistency import (
    check_device,
    check_formats,
    check_generation,
    check_inputs,
    check_measuring,
    check_precision,
    check_processing,
    check_register,
    check_tolerance,
)
from optexport.config.custom_code import check_custom_code
from optexport.config.metrics import METRIC
from optexport.config.schema import Config, TransformationConfig
from optexport.config.source import SourceKind, check_beside_source, check_module, check_source, source_kind
from optexport.config.tracking_uri import check_database_folder
from optexport.config.validation import Mistakes, explained
from optexport.transformations import registry


def load_config(path: Path, without: Collection[str] = ()) -> Config:
    """Reads and checks a config file, without importing torch.

    Args:
        without: Names of rules that the run omits.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an invalid value.
    """
    return parse_config(config_text.read(path), path, without)


def parse_config(text: str, path: Path, without: Collection[str] = ()) -> Config:
    """Checks the text of a config file, which does not have to exist at the path.

    Raises:
        ConfigError: As for `load_config`.
    """
    raw = config_text.parse(text, path)
    config = checked_settings(raw, str(path))
    check_custom_code(config, str(path))  # must come first: looking up rules may import a package
    mistakes = Mistakes(str(path))
    mistakes.of(config_text.check_secrets, raw, text, str(path))
    for index, rule in enumerate(config.rules()):
        location = f"{path}: transformations[{index}]"
        mistakes.of(_check_rule, rule, path.parent, location)
    for name in config.parity.metrics or ():
        if name.startswith(METRIC):
            location = f"{path}: parity.metrics.{name}"
            mistakes.of(check_module, name.removeprefix(METRIC), path.parent, location)
    mistakes.of(check_formats, config, str(path))
    formats, dynamic = config.export.formats, config.inputs.dynamic
    mistakes.of(check_measuring, config.bench, config.gate, formats, dynamic, str(path))
    for check in (check_source, check_beside_source):
        mistakes.of(check, config, path)
    if config.tracking.enabled:
        mistakes.of(check_database_folder, config.tracking.uri, path)
    of_program = source_kind(config.model.source, path.parent) in (SourceKind.PT2, SourceKind.TORCHSCRIPT)
    mistakes.of(check_inputs, config.inputs, of_program=of_program, location=str(path))
    mistakes.of(check_tolerance, config, without, str(path))
    mistakes.of(check_processing, config, path.parent, str(path))
    for check_table in (check_precision, check_generation, check_register, check_device):
        mistakes.of(check_table, config, str(path))
    mistakes.tell()
    return config


def checked_settings(raw: dict[str, Any], location: str) -> Config:
    """Checks settings, which need not be from a file.

    Raises:
        ConfigError: A value is invalid.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise explained(error, Config, location) from error


def _check_rule(rule: TransformationConfig, folder: Path, location: str) -> None:
    """Checks the name and the options of a rule.

    Args:
        folder: The folder of the config, which may contain a plugin.
        location: The path of the config, and the rule's index.

    Raises:
        ConfigError: The rule or one of its options does not exist.
    """
    registry.check(rule.use, rule.options, location)
    if rule.use.startswith(registry.PLUGIN):
        check_module(rule.use.removeprefix(registry.PLUGIN), folder, f"{location}.use")
