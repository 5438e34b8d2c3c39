"""The command ``optexport new-rule``, which writes a rule, its test, and a config."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
import sys
from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command
from optexport.cli._templates import check_new, read_template, write_files
from optexport.errors import ConfigError
from optexport.transformations.registry import canonical_name

_FILES = {"rule.py.txt": "{module}.py", "test.py.txt": "test_{module}.py", "config.toml.txt": "{module}.toml"}
# In characters: file systems limit names to 255 bytes.
_MAX_LENGTH = 100


@click.command("new-rule", cls=Command, examples=["optexport new-rule drop-tanh --folder rules"])
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="The folder to write to (default: the working directory).",
)
def new_rule(name: str, folder: Path) -> None:
    """Write a new rule, its test and its config.

    Use this to start your own transformation. NAME is in lower case, such as drop-tanh. The files work as they are: the
    rule removes double negations. Replace its match and rewrite with yours.
    """
    rule, test, config = write_rule(name, folder)
    echo(f"Wrote {rule}, {test} and {config}. Now run:")
    echo(f"  pip install pytest; python -m pytest {test}; optexport run {config}")
    echo("The rule is an example that removes double negations. Replace its match and rewrite, and the test.")


def write_rule(name: str, folder: Path) -> list[Path]:
    """Writes the files of a new rule.

    Args:
        name: Such as ``drop-tanh``, which gives ``drop_tanh.py`` with the class ``DropTanh``.
        folder: The folder for the files.

    Returns:
        The paths of the rule, its test and its config.

    Raises:
        ConfigError: The name is not a valid module name or is already used, or one of the files exists.
    """
    module = name.replace("-", "_")
    suggestion = f"Choose another name, such as drop-{name}."
    if keyword.iskeyword(module):
        raise ConfigError(f"{module} is a Python keyword", location="NAME", hint=suggestion)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or len(module) > _MAX_LENGTH:
        hint = f"Use at most {_MAX_LENGTH} lower-case letters, digits and hyphens, as in drop-tanh."
        raise ConfigError(f'"{name}" is not a valid name of a rule', location="NAME", hint=hint)
    if canonical_name(name) is not None:
        raise ConfigError(f"a built-in rule has the name {name}", location="NAME", hint="Choose another name.")
    class_name = "".join(word.capitalize() for word in module.split("_"))
    texts = {folder / target.format(module=module): read_template(template) for template, target in _FILES.items()}
    check_new(texts)
    if module in {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "test", "conftest"}:
        raise ConfigError(f"a Python module has the name {module}", location="NAME", hint=suggestion)
    if any(re.search(rf"\b{class_name}\b", text) for text in texts.values()):
        raise ConfigError(f"the files of a rule use the name {class_name}", location="NAME", hint=suggestion)
    write_files(texts, module=module, class_name=class_name)
    return list(texts)
