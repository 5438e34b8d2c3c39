"""Loads a config file and reports all its mistakes at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from optexport.config import toml_file
from optexport.config.consistency import (
    check_benchmarks,
    check_device,
    check_formats,
    check_generation,
    check_inputs,
    check_precision,
    check_processing,
    check_register,
    check_tolerance,
)
from optexport.config.custom_code import check_custom_code
from optexport.config.metrics import CUSTOM_METRIC
from optexport.config.schema import Config, TransformationConfig
from optexport.config.source import SourceKind, check_module, check_source, check_source_keys, model_name, source_kind
from optexport.config.tracking_uri import check_database_folder
from optexport.config.validation import Mistakes, explain_errors
from optexport.transformations import registry


def load_config(path: Path, without: Collection[str] = ()) -> Config:
    """Reads and checks a config file, without importing torch.

    Args:
        without: Names of rules that the run omits.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an invalid value.
    """
    return parse_config(toml_file.read_config(path), path, without)


def parse_config(text: str, path: Path, without: Collection[str] = ()) -> Config:
    """Checks the text of a config file, which does not have to exist at the path.

    Raises:
        ConfigError: As for `load_config`.
    """
    raw = toml_file.parse(text, path)
    config = _name_outputs(validate_settings(raw, str(path)), path.parent)
    check_custom_code(config, str(path))  # must come first: looking up rules may import a package
    mistakes = Mistakes(str(path))
    mistakes.collect(toml_file.check_secrets, raw, text, str(path))
    for index, rule in enumerate(config.rules()):
        location = f"{path}: transformations[{index}]"
        mistakes.collect(_check_rule, rule, path.parent, location)
    for name in config.parity.metrics or ():
        if name.startswith(CUSTOM_METRIC):
            location = f"{path}: parity.metrics.{name}"
            mistakes.collect(check_module, name.removeprefix(CUSTOM_METRIC), path.parent, location)
    mistakes.collect(check_formats, config, str(path))
    formats, dynamic = config.export.formats, config.inputs.dynamic
    mistakes.collect(check_benchmarks, config.bench, config.gate, formats, dynamic, str(path))
    for check in (check_source, check_source_keys):
        mistakes.collect(check, config, path)
    if config.tracking.enabled:
        mistakes.collect(check_database_folder, config.tracking.store, path)
    is_program = source_kind(config.model.source, path.parent) in (SourceKind.PT2, SourceKind.TORCHSCRIPT)
    mistakes.collect(check_inputs, config.inputs, is_program=is_program, location=str(path))
    mistakes.collect(check_tolerance, config, without, str(path))
    mistakes.collect(check_processing, config, path.parent, str(path))
    for check_table in (check_precision, check_generation, check_register, check_device):
        mistakes.collect(check_table, config, str(path))
    mistakes.raise_all()
    return config


def _name_outputs(config: Config, folder: Path) -> Config:
    """Returns the config with an output and an experiment; by default, they have the name of the model."""
    name, export, tracking = model_name(config.model.source, folder), config.export, config.tracking
    if "output" not in export.model_fields_set:
        export = export.model_copy(update={"output": f"build/{name}"})
    if "experiment" not in tracking.model_fields_set:
        tracking = tracking.model_copy(update={"experiment": name})
    return config.model_copy(update={"export": export, "tracking": tracking})


def validate_settings(raw: dict[str, Any], location: str) -> Config:
    """Checks settings, which need not be from a file.

    Raises:
        ConfigError: A value is invalid.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise explain_errors(error, Config, location) from error


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
