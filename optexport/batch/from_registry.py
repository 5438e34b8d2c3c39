"""Configs for the models of an MLflow registry, written from one template."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optexport.batch.results import TaskResult
from optexport.config import text as config_text
from optexport.config.load import parse_config
from optexport.config.source import NAME, VERSION
from optexport.errors import ConfigError, on_one_line
from optexport.tracking.registry import query as registry_query
from optexport.tracking.registry.query import Version


@dataclass(frozen=True)
class Asked:
    """Configs for the versions of a registry that have not been exported.

    Attributes:
        store: The URI of the registry.
        folder: The folder that relative paths in the URI start from.
        versions: Versions to export, by the path of the config of each.
        refused: Failed results of versions whose names do not fit into a config.
        left: Names of models in the filter whose newest version needs no export.
    """

    store: str
    folder: Path
    versions: Mapping[str, Version]
    refused: Sequence[TaskResult]
    left: Sequence[str]

    def told(self) -> str:
        """Returns the message for a batch without configs."""
        if not self.left:
            return "Nothing asks for a bundle: the filter finds no registered model."
        names = on_one_line(", ".join(self.left))
        return f"Nothing asks for a bundle: the newest version of each model found has one, or is of one: {names}."

    def mark(self, ended: TaskResult) -> None:
        """Tags a version as exported, if its config succeeded.

        Args:
            ended: Result of a config.

        Raises:
            OptexportError: The store cannot be reached, or the bundle cannot be read.
        """
        if ended.config in self.versions and ended.exit_code == 0 and ended.output is not None:
            registry_query.mark(self.store, self.folder, self.versions[ended.config], Path(ended.output))


def configs(template: Path, query: str) -> Asked:
    """Writes a config next to the template for each version to export.

    Args:
        template: A config with ``{name}`` and ``{version}`` in the source and the output. It names the store.
        query: A filter of MLflow's registered models.

    Raises:
        ConfigError: The template is invalid or lacks a placeholder, or the filter is invalid.
        TrackingError: The store cannot be reached.
    """
    text = config_text.read(template)
    store = parse_config(_filled(text, Version("name", "1")), template).tracking.uri
    document = tomllib.loads(text)
    for table, key in (("model", "source"), ("export", "output")):
        if not all(word in document.get(table, {}).get(key, "") for word in (NAME, VERSION)):
            raise ConfigError(
                f'it must hold both "{NAME}" and "{VERSION}"',
                location=f"{template}: {table}.{key}",
                hint='As in: source = "mlflow:models:/{name}/{version}", and output = "bundles/{name}-{version}".',
            )
    written, refused = {}, []
    asking, left = registry_query.wanted(store, template.parent, query)
    for version in asking:
        if not version.name.isprintable() or version.name.startswith(".") or set(version.name) & set("\"'\\/?@"):
            uri = f"models:/{version.name}/{version.version}"
            refused.append(
                TaskResult(uri, uri, "", ConfigError.exit_code, "a name with such characters fits no config")
            )
            continue
        path = template.with_name(f"{template.stem}.{version.name}-{version.version}.toml")
        _write(path, _filled(text, version))
        written[str(path)] = version
    return Asked(store, template.parent, written, refused, left)


def _filled(text: str, version: Version) -> str:
    filling = {NAME: version.name, VERSION: version.version}
    # One pass over the text: the name of a model may itself contain "{version}".
    return re.sub("|".join(map(re.escape, filling)), lambda found: filling[found[0]], text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}", location=str(path)) from error
