"""Writes new files from the templates of this package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template

from optexport.errors import ConfigError


def read_template(name: str) -> str:
    """Returns the text of a template."""
    return resources.files("optexport.cli").joinpath("templates", *name.split("/")).read_text(encoding="utf-8")


def check_new(paths: Mapping[Path, str]) -> None:
    """Checks that files do not exist.

    Raises:
        ConfigError: One exists.
    """
    for path in paths:
        if path.exists():
            raise ConfigError("the file exists", location=str(path), hint="Choose another name or folder.")


def write_files(texts: Mapping[Path, str], **values: str) -> None:
    """Writes files from the texts of templates.

    Args:
        texts: The text of each file.
        values: The values of the variables.

    Raises:
        ConfigError: A file cannot be written.
    """
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(text).substitute(values), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the file: {error}", location=str(path)) from error
