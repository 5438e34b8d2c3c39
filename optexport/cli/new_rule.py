"""Writes the files of ``optexport new-rule``: a rule, its test, and a config."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from string import Template

from optexport.errors import ConfigError
from optexport.transformations.registry import canonical_name

_FILES = {"rule.py.txt": "{module}.py", "test.py.txt": "test_{module}.py", "config.toml.txt": "{module}.toml"}
# In characters: file systems limit names to 255 bytes.
_LONGEST = 100


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
    if keyword.iskeyword(module):
        raise ConfigError(f"{module} is a Python keyword", location="NAME", hint=f"Write drop-{module}, say.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or len(module) > _LONGEST:
        hint = f"Write small letters, as in drop-tanh, and no more than {_LONGEST}."
        raise ConfigError(f'"{name}" cannot name a rule', location="NAME", hint=hint)
    if canonical_name(name) is not None:
        raise ConfigError(f"there is a built-in rule {name}", location="NAME", hint="Choose another name.")
    class_name = "".join(word.capitalize() for word in module.split("_"))
    written = {folder / target.format(module=module): _template(template) for template, target in _FILES.items()}
    for path in written:
        if path.exists():
            raise ConfigError("it is there already", location=str(path), hint="Choose another name or folder.")
    if module in {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "test", "conftest"}:
        raise ConfigError(f"there is a module {module}", location="NAME", hint=f"Write drop-{module}, say.")
    if any(re.search(rf"\b{class_name}\b", text) for text in written.values()):
        raise ConfigError(
            f"{class_name} is what a rule is made with", location="NAME", hint=f"Write drop-{module}, say."
        )
    for path, text in written.items():
        try:
            path.write_text(Template(text).substitute(module=module, class_name=class_name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"it cannot be written: {error}", location=str(path)) from error
    return list(written)


def _template(name: str) -> str:
    return resources.files("optexport.cli").joinpath("templates", name).read_text(encoding="utf-8")
