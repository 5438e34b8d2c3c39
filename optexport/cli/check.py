"""The command ``optexport check``, which checks configs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, no_custom_code_option
from optexport.cli._option_names import name_options
from optexport.errors import ConfigError, DeviceError, OptexportError


@click.command(
    cls=Command,
    examples=[
        "optexport check optexport.toml",
        "optexport check configs/*.toml --no-custom-code",
    ],
)
@click.argument(
    "configs", nargs=-1, required=True, metavar="CONFIG...", type=click.Path(path_type=Path, dir_okay=False)
)
@no_custom_code_option
def check(configs: tuple[Path, ...]) -> None:
    """Check configs without loading a model.

    Use this before a run, or in a pre-commit hook. It is fast, because it does not import torch. It also checks that
    the model's folder has a model, that the needed packages are installed, and that the output folder can be written.

    It does not run your code: of a python: source, only the module is looked up.
    """
    from optexport.config.error_locations import naming_config
    from optexport.config.load import load_config
    from optexport.config.requirements import check_machine, find_open_question

    errors: list[OptexportError] = []
    for path in configs:
        try:
            with naming_config(path):
                config = load_config(path)
                check_machine(config, path)
        except (ConfigError, DeviceError) as error:  # the other configs are checked too
            name_options(error)
            errors.append(error)
            continue
        rules = ", ".join(rule.use for rule in config.rules())
        echo(f"{path}: OK ({f'rules: {rules}' if rules else 'no rules'})")
        if (question := find_open_question(config)) is not None:
            echo(question)
    if len(errors) > 1:
        details = "\n".join(textwrap.indent(str(error), "  ") for error in errors)
        raise ConfigError(f"{len(errors)} of {len(configs)} configs have errors\n{details}")
    if errors:
        raise errors[0]
