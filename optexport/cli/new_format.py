"""The command ``optexport new-format``, which writes a package with a format, and its test."""

from __future__ import annotations

import re
from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command
from optexport.cli._templates import check_new, read_template, write_files
from optexport.errors import ConfigError
from optexport.exporters.registry import RESERVED_SUFFIXES, is_format, list_suffixes

_FILES = {"pyproject.toml": "pyproject.toml", "format.py": "optexport_{name}.py", "test.py": "test_optexport_{name}.py"}
# In characters: file systems limit names to 255 bytes.
_MAX_LENGTH = 50


@click.command("new-format", cls=Command, examples=["optexport new-format tflite"])
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="The folder to write to (default: the working directory).",
)
def new_format(name: str, folder: Path) -> None:
    """Write a new file format, as a package with its test.

    Use this to export to a format that optexport lacks. NAME is in lower case, such as tflite. The package works as it
    is: it writes ONNX files, and runs them with the reference implementation of ONNX. Replace its write and open with
    yours.
    """
    package, module, test = write_format(name, folder)
    echo(f"Wrote {package}, {module} and {test}. Now run:")
    echo(f"  pip install pytest; pip install -e {package.parent}; python -m pytest {test}")


def write_format(name: str, folder: Path) -> list[Path]:
    """Writes the files of a new format, in a folder of their own.

    Args:
        name: Such as ``tflite``, which gives ``optexport-tflite/optexport_tflite.py`` with the class ``TfliteFormat``.
        folder: The folder for the new folder.

    Returns:
        The paths of the project file, the module and its test.

    Raises:
        ConfigError: The name is not valid or is already used, or one of the files exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or len(name) > _MAX_LENGTH:
        hint = f"Use at most {_MAX_LENGTH} lower-case letters and digits, as in tflite."
        raise ConfigError(f'"{name}" is not a valid name of a format', location="NAME", hint=hint)
    if is_format(name) or f".{name}" in (*RESERVED_SUFFIXES, *list_suffixes()):
        raise ConfigError(f"the name {name} is already used", location="NAME", hint="Choose another name.")
    root = folder / f"optexport-{name}"
    texts = {
        root / target.format(name=name): read_template(f"format/{source}.txt") for source, target in _FILES.items()
    }
    check_new(texts)
    write_files(texts, name=name, class_name=f"{name.capitalize()}Format")
    return list(texts)
