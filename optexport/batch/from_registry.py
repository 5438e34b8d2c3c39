"""Configs for the models of an MLflow registry, written from one template."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optexport.batch.results import TaskResult
from optexport.config import toml_file
from optexport.config.load import parse_config
from optexport.config.source import NAME, VERSION
from optexport.errors import ConfigError, on_one_line
from optexport.tracking.registry import query
from optexport.tracking.registry.query import Version


@dataclass(frozen=True)
class RegistryBatch:
    """Configs for the versions of a registry that have not been exported.

    Attributes:
        store: The URI of the registry.
        folder: The folder that relative paths in the URI start from.
        versions: Versions to export, by the path of the config of each.
        failures: Failed results of versions whose names do not fit into a config.
        skipped: Names of models in the filter whose newest version needs no export.
    """

    store: str
    folder: Path
    versions: Mapping[str, Version]
    failures: Sequence[TaskResult]
    skipped: Sequence[str]

    def describe_empty(self) -> str:
        """Returns the message for a batch without configs."""
        if not self.skipped:
            return "Nothing to export: the filter matches no registered model."
        names = on_one_line(", ".join(self.skipped))
        return f"Nothing to export: the newest version of each matching model already has a bundle: {names}."

    def mark_exported(self, result: TaskResult) -> None:
        """Tags a version as exported, if its config succeeded.

        Args:
            result: Result of a config.

        Raises:
            OptexportError: The store cannot be reached, or the bundle cannot be read.
        """
        if result.config in self.versions and result.exit_code == 0 and result.output is not None:
            query.mark_exported(self.store, self.folder, self.versions[result.config], Path(result.output))


def write_configs(template: Path, filter_text: str) -> RegistryBatch:
    """Writes a config next to the template for each version to export.

    Args:
        template: A config with ``{name}`` and ``{version}`` in the source and the output. It names the store.
        filter_text: A filter of MLflow's registered models.

    Raises:
        ConfigError: The template is invalid or lacks a placeholder, or the filter is invalid.
        TrackingError: The store cannot be reached.
    """
    text = toml_file.read(template)
    store = parse_config(_fill(text, Version("name", "1")), template).tracking.store
    document = tomllib.loads(text)
    for table, key in (("model", "source"), ("export", "output")):
        if not all(word in document.get(table, {}).get(key, "") for word in (NAME, VERSION)):
            raise ConfigError(
                f'the value must contain "{NAME}" and "{VERSION}"',
                location=f"{template}: {table}.{key}",
                hint='For example: source = "mlflow:models:/{name}/{version}", output = "bundles/{name}-{version}".',
            )
    versions, failures = {}, []
    newest, skipped = query.find_versions_to_export(store, template.parent, filter_text)
    for version in newest:
        if not version.name.isprintable() or version.name.startswith(".") or set(version.name) & set("\"'\\/?@"):
            uri = f"models:/{version.name}/{version.version}"
            failures.append(
                TaskResult(
                    uri,
                    uri,
                    "",
                    ConfigError.exit_code,
                    "the model's name has characters that are not allowed in a config",
                )
            )
            continue
        path = template.with_name(f"{template.stem}.{version.name}-{version.version}.toml")
        _write(path, _fill(text, version))
        versions[str(path)] = version
    return RegistryBatch(store, template.parent, versions, failures, skipped)


def _fill(text: str, version: Version) -> str:
    values = {NAME: version.name, VERSION: version.version}
    # One pass over the text: the name of a model may itself contain "{version}".
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the config cannot be written: {error}", location=str(path)) from error
