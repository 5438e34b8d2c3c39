"""A batch of what a registry asks for: one config for each model, written from a template."""

from __future__ import annotations

import re
from pathlib import Path

from optexport.config.file import parse_config
from optexport.errors import ConfigError
from optexport.tracking import wanted
from optexport.tracking.wanted import Version

NAME, VERSION = "{name}", "{version}"


def configs(template: Path, query: str) -> dict[Path, Version]:
    """Writes a config for each version that asks for a bundle, beside the template; returns the versions by config.

    Args:
        template: A config in whose text ``{name}`` and ``{version}`` stand for those of a model. It says which store.
        query: A filter of MLflow's registered models.

    Raises:
        ConfigError: The template is wrong, or lacks one of the two where both must stand.
        TrackingError: The store cannot be reached, or does not understand the filter.
    """
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"it cannot be read: {error}", place=str(template)) from error
    for key in ("source", "output"):
        if not re.search(rf"^\s*{key}\s*=.*{re.escape(NAME)}.*{re.escape(VERSION)}", text, re.MULTILINE):
            raise ConfigError(
                f'{key} must hold both "{NAME}" and "{VERSION}", in this order',
                place=str(template),
                mend='As in: source = "mlflow:models:/{name}/{version}", and output = "bundles/{name}-{version}".',
            )
    written = {}
    for version in wanted.wanted(_store(text, template), template.parent, query):
        if not re.fullmatch(r"[\w.+ -]*\w[\w.+ -]*", version.name):
            raise ConfigError(
                "it cannot be part of a path", place=f"registered model {version.name!r}", mend="Give it a plain name."
            )
        path = template.with_name(f"{template.stem}.{version.name}-{version.version}.toml")
        _write(path, _filled(text, version))
        written[path] = version
    return written


def mark(template: Path, version: Version, bundle: Path) -> None:
    """Notes in the template's store that a version has a bundle.

    Raises:
        TrackingError: The store cannot be reached.
    """
    wanted.mark(_store(template.read_text(encoding="utf-8"), template), template.parent, version, bundle)


def _store(text: str, template: Path) -> str:
    return parse_config(_filled(text, Version("name", "1")), template).tracking.uri


def _filled(text: str, version: Version) -> str:
    return text.replace(NAME, version.name).replace(VERSION, version.version)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}", place=str(path)) from error
