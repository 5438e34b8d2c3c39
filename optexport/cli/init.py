"""The command ``optexport init``, which writes a config to start from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from string import Template

import click

from optexport.cli._console import echo
from optexport.cli._group import Command
from optexport.cli._templates import read_template
from optexport.errors import ConfigError


@click.command(cls=Command, examples=["optexport init ./my-model", "optexport init bert-base-uncased -o bert.toml"])
@click.argument("source", required=False, default=".")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("optexport.toml"),
    show_default=True,
    help="The config file to write.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(source: str, output: Path, force: bool) -> None:
    """Write a commented config for the model at SOURCE.

    Use this to start with a new model, and edit the file before the first run. The model is not loaded: the inputs and
    the task are read from its config.json, or from the Python file of a factory, and guessed otherwise. For a file of
    weights, it also writes the start of a function that builds the model and loads them.

    \b
    SOURCE is one of:
      a folder                       written by save_pretrained (default: .)
      a hub id                       such as bert-base-uncased
      package:NAME/PATH              a folder in an installed package
      python:module:factory          a function that returns the model
      mlflow:models:/NAME@ALIAS      a model in an MLflow registry
      a .pt2 or TorchScript file     (.pt, .ts, .jit)
      a file of weights              (.pth, .bin, .ckpt, .safetensors)
    """  # noqa: D301 - click does not wrap the paragraph after this escape
    from optexport.cli._starter_config import starter_config
    from optexport.cli._starter_inputs import GUESS, GUESSED_SHAPES, GUESSED_SIZE
    from optexport.config.load import parse_config
    from optexport.config.requirements import check_extras
    from optexport.config.source import find_model_problem, find_source_folder, is_weights_file

    _check_output(output, force=force)
    if output.parent != Path() and os.path.exists(source) and not os.path.isabs(source):
        source = os.path.relpath(source, output.parent)  # a config resolves it from its own folder
    if is_weights_file(source, output.parent):
        source = _write_factory(source, output.parent)
    text = starter_config(source, output.parent)
    config = parse_config(text, output)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the file: {error}", location=str(output)) from error
    is_guessed = any(guess in text for guess in (GUESS, GUESSED_SHAPES, GUESSED_SIZE))
    advice = "Its inputs are guessed: edit [inputs]" if is_guessed else "Edit it if needed"
    echo(f"Wrote {output}. {advice}, then run: optexport run {shlex.quote(str(output))}")
    folder = find_source_folder(source, output.parent)
    if folder is not None and (problem := find_model_problem(folder, source)) is not None:
        echo(f"model.source: {problem[0]}. {problem[1]}")
    try:
        check_extras(config, output)
    except ConfigError as error:  # the written config is valid without the extras
        echo(str(error))


def _write_factory(weights: str, folder: Path) -> str:
    """Writes a Python file with a function that loads weights, and returns the source that names it.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    module = re.sub(r"\W+", "_", f"{Path(weights).stem}_model", flags=re.ASCII)
    path = folder / f"{module if module.isidentifier() else f'model_{module}'}.py"
    if path.exists():
        hint = f'If it builds the model, run: optexport init "python:{path.stem}:build"'
        raise ConfigError("the file exists", location=str(path), hint=hint)
    safetensors = weights.endswith(".safetensors")
    location = f"Path(__file__).parent / {weights!r}"
    template = read_template("weights.py.txt")
    text = Template(template).substitute(
        weights=ascii(weights),
        imports="from safetensors.torch import load_file\n" if safetensors else "",
        load=f"load_file({location})" if safetensors else f'torch.load({location}, map_location="cpu")',
    )
    try:
        path.write_bytes(text.encode("utf-8"))
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(f"cannot write the file: {error}", location=str(path)) from error
    echo(f"Wrote {path}. Replace MODULE and MODEL in it by the module and the class of your model.")
    return f"python:{path.stem}:build"


def _check_output(output: Path, *, force: bool) -> None:
    location = str(output)
    if output.exists() and not force:
        raise ConfigError(
            "the file exists", location=location, hint="Choose another file with --output, or replace it with --force."
        )
    if not output.parent.is_dir():
        raise ConfigError(f"the folder {output.parent} does not exist", location=location)
    if output.exists() and not output.is_file():
        raise ConfigError("the path is not a regular file, and is not replaced", location=location)
