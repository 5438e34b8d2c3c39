"""The command ``optexport export``, which exports a model without a config file."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich_click import RichOptionPanel

from optexport.cli._console import echo
from optexport.cli._format_option import check_formats
from optexport.cli._group import Command
from optexport.cli._pipeline_run import output_options, pipeline_options, publish_errors, run_config
from optexport.errors import ConfigError, OptexportError, did_you_mean

if TYPE_CHECKING:
    from optexport.cli._starter_config import Tensor

# The config is in no file, so this is the name of its location in errors. Paths start at the working directory.
_NO_FILE = Path("optexport export")
# The option for each key of the config, in errors.
_OPTIONS = {
    r"model\.source": "SOURCE",
    r"model\.task": "--task",
    r"inputs\.dynamic\.?": "--dynamic ",
    r"inputs\.tensors\.?": "--input ",
    r"inputs\.data": "--data",
    r"inputs: (?=\w+$)": "--input ",
    r"inputs$": "SOURCE",
    r"transformations\[\d+\](?:\.use)?": "--transform",
    r"export\.formats(?:\[\d+\])?": "--format",
    r"export\.output": "--output",
    r"tune\.budget": "--budget",
    r"tracking\.uri": "--uri",
    r"tracking\.experiment": "--experiment",
}
_PANELS = [
    RichOptionPanel("Model and inputs", options=["--task", "--dynamic", "--input", "--data"]),
    RichOptionPanel("Bundle", options=["--output", "--format", "--save-config", "--baseline"]),
    RichOptionPanel("Rules", options=["--transform", "--without", "--tune", "--budget", "--dump"]),
    RichOptionPanel("MLflow", options=["--uri", "--experiment", "--no-tracking"]),
]
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")


def _ranges(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, tuple[int, int]]:  # noqa: ARG001 - click's
    """Parses ranges such as ``batch=1:64``."""
    ranges: dict[str, tuple[int, int]] = {}
    for text in values:
        parts = re.fullmatch(r"(\w+)=(\d{1,10}):(\d{1,10})", text, re.ASCII)
        if parts is not None and parts[1] in ranges:
            raise click.BadParameter(f"the axis {parts[1]} is given twice.")
        if parts is not None and int(parts[2]) > int(parts[3]):
            raise click.BadParameter(f"the smallest size of {parts[1]}, {parts[2]}, exceeds the largest, {parts[3]}.")
        if parts is None or not 1 <= int(parts[2]) <= int(parts[3]) < 2**31:
            raise click.BadParameter(f'"{text}" does not have the form NAME=MIN:MAX, such as batch=1:64.')
        ranges[parts[1]] = int(parts[2]), int(parts[3])
    return ranges


def _tensors(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, Tensor]:  # noqa: ARG001 - click's
    """Parses inputs such as ``x=batch,3,224,224`` or ``ids=batch,sequence:int64``."""
    from optexport.cli._starter_config import Tensor

    tensors: dict[str, Tensor] = {}
    for text in values:
        parts = re.fullmatch(rf"([\w.]+)=(\w{{1,64}}(?:,\w{{1,64}})*)(?::({'|'.join(_DTYPES)}))?", text, re.ASCII)
        if parts is not None and parts[1] in tensors:
            raise click.BadParameter(f"the input {parts[1]} is given twice.")
        if parts is None:
            raise click.BadParameter(
                f'"{text}" does not have the form NAME=SIZE,...[:DTYPE], such as x=batch,3,224,224'
                " or ids=batch,sequence:int64."
            )
        shape = [int(size) if size.isdecimal() else size for size in parts[2].split(",")]
        tensors[parts[1]] = Tensor(shape, parts[3] or "float32")
    return tensors


@click.command(
    cls=Command,
    panels=_PANELS,
    examples=[
        "optexport export ./my-model -o build/my-model",
        "optexport export python:my_model:build --input x=batch,3,224,224 --format onnx",
    ],
)
@click.argument("source")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of the bundle (default: build/ and the name of the folder, file or Python module).",
)
@click.option("--task", help="The task, such as text-classification (default: from config.json).")
@click.option(
    *("--format", "formats"),
    callback=check_formats,
    metavar="FORMAT",
    multiple=True,
    help="A format to export: onnx, torchscript, pt2, or another one (default: these three). May be repeated.",
)
@click.option(
    "--dynamic",
    multiple=True,
    callback=_ranges,
    metavar="NAME=MIN:MAX",
    help="A dynamic axis and its sizes, such as batch=1:64. May be repeated. If it is given, other axes are fixed.",
)
@click.option(
    *("--input", "tensors"),
    multiple=True,
    callback=_tensors,
    metavar="NAME=SIZE,...",
    help="An input of random numbers, such as x=batch,3,224,224 or ids=batch,sequence:int64. May be repeated.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help='A .jsonl file with lines such as {"text": "..."}, or a .npz or .safetensors file, with the inputs.',
)
@click.option(
    *("--transform", "rules"),
    multiple=True,
    metavar="RULE",
    help="A rule of optexport transformations, instead of the default rules. May be repeated.",
)
@pipeline_options
@click.option("--budget", metavar="TIME", help="The time of a run with --tune, such as 90s or 10m (default: 5m).")
@click.option("--uri", help="The MLflow store (default: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db).")
@click.option("--experiment", help="The MLflow experiment (default: the name of the model).")
@click.option("--no-tracking", is_flag=True, help="Do not track the run in MLflow.")
@click.option(
    "--save-config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the config of this export to a file, for optexport run.",
)
@output_options
def export(
    source: str,
    output: Path | None,
    task: str | None,
    formats: tuple[str, ...],
    dynamic: dict[str, tuple[int, int]],
    tensors: dict[str, Tensor],
    data: Path | None,
    rules: tuple[str, ...],
    without: tuple[str, ...],
    tune: bool,
    budget: str | None,
    baseline: bool,
    dump: Path | None,
    uri: str | None,
    experiment: str | None,
    no_tracking: bool,
    save_config: Path | None,
    junit: Path | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Export the model at SOURCE without a config file.

    Use this for a first export. It makes the config that optexport init would write, changed by the options, and runs
    it as optexport run does, with all checks. With --save-config it also writes this config, so that you can edit it
    and run it again.

    SOURCE is a folder such as ./my-model, a hub id, python:module:factory, package:NAME/PATH,
    mlflow:models:/NAME@ALIAS, a .pt2 file or a TorchScript file.

    Without --input and --data, the inputs are two example sentences, or random numbers that fit the model's config.json
    or the .pt2 file. Give your own, because the checks are as good as the inputs.
    """
    from optexport.bundle.layout import output_folders
    from optexport.cli._starter_config import Choices, starter_config
    from optexport.config.benchmarks import TuneConfig
    from optexport.config.load import parse_config
    from optexport.config.requirements import check_machine
    from optexport.config.source import check_module, model_name
    from optexport.exporters.registry import DEFAULT_FORMATS
    from optexport.report import junit as report_junit

    if tensors and data is not None:
        raise click.UsageError("give either --input or --data, not both.")
    if budget is not None and not tune:
        raise click.UsageError("--budget needs --tune.")
    path = save_config or _NO_FILE
    name = model_name(source, Path())
    with _naming_options(path):
        choices = Choices(
            task=task,
            output=_relative(output or Path("build", name), path),
            formats=formats or DEFAULT_FORMATS,
            dynamic=dynamic,
            tensors=tensors,
            data=None if data is None else _relative(data.expanduser(), path),
            rules=_choose_rules(rules, without),
            budget=(budget or TuneConfig().budget) if tune else None,
            uri=_choose_uri(uri, path),
            experiment=name if experiment is None else experiment,
            is_tracked=not no_tracking,
            guesses=False,
        )
        if save_config is not None and source.startswith("python:"):
            check_module(source.removeprefix("python:"), path.parent, f"--save-config {path}")
        if path.parent != Path() and os.path.exists(source):
            source = _relative(Path(source), path)
        text = starter_config(source, path.parent, choices)
        try:
            config = parse_config(text, path)  # reports mistakes before the slow import of torch
            check_machine(config, path)
        except ConfigError:
            report_junit.start(junit, [])
            with publish_errors(name, junit):
                raise
    is_new = save_config is not None and not save_config.exists()
    if save_config is not None:
        _save(text, save_config)
    report_junit.start(junit, [*filter(None, (save_config, data)), *output_folders(config.output_path(path.parent))])
    try:
        with _naming_options(path):
            run_config(
                config,
                path,
                text,
                title=name,
                junit=junit,
                quiet=quiet,
                verbose=verbose,
                as_json=as_json,
                baseline=baseline,
                dump=dump,
            )
        if not (tensors or data or quiet):
            made_up = "two example sentences" if config.inputs.texts else "random numbers"
            echo(f"The inputs were {made_up}. To check with your own: --data FILE", err=True)
    except ConfigError:
        if save_config is not None and is_new:  # so that the corrected command can write it
            save_config.unlink(missing_ok=True)
        raise
    finally:
        if save_config is not None and save_config.exists():
            echo(f"Wrote {save_config}. To repeat this export: optexport run {shlex.quote(str(save_config))}", err=True)


def _relative(path: Path, config: Path) -> str:
    """Returns a path of the command line as it is written in a config."""
    return str(path) if config.parent == Path() or path.is_absolute() else os.path.relpath(path, config.parent)


def _choose_uri(option: str | None, config: Path) -> str | None:
    """Returns the URI for a config; None leaves the choice to the environment."""
    from optexport.config.tracking_uri import find_environment_uri

    if option is not None:
        return _relative_uri(option, config)
    return None if find_environment_uri() else _relative_uri("sqlite:///mlflow.db", config)


def _relative_uri(uri: str, config: Path) -> str:
    """Returns a tracking URI as it is written in a config; only that of a local database has a path."""
    scheme = "sqlite:///"
    if not uri.startswith(scheme) or uri == scheme:
        return uri
    return f"{scheme}{_relative(Path(uri.removeprefix(scheme)), config)}"


def _choose_rules(rules: Sequence[str], without: Sequence[str]) -> list[str]:
    from optexport.transformations.registry import PRESET, canonical_name

    chosen = {canonical_name(rule) or rule: rule for rule in rules or PRESET}
    for rule in without:
        if chosen.pop(canonical_name(rule) or rule, None) is None:
            raise ConfigError(
                f"the rule {rule} is not applied, so it cannot be left out",
                location=f"--without {rule}",
                hint=did_you_mean(rule, chosen),
            )
    return [*chosen.values()]


def _save(text: str, path: Path) -> None:
    try:
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                "the file exists and has other content, so it is not replaced",
                location=f"--save-config {path}",
                hint="Choose another file, or remove this one.",
            )
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot write the file: {error}", location=f"--save-config {path}") from error


@contextlib.contextmanager
def _naming_options(path: Path) -> Iterator[None]:
    """Names the options of this command in errors, instead of keys of the config."""

    def name_options(text: str) -> str:
        for key, option in _OPTIONS.items():
            text = re.sub(rf"^(?:{re.escape(str(path))}: )?{key}", option, text, flags=re.MULTILINE)
        return text

    try:
        yield
    except OptexportError as error:
        location = name_options(error.location or "").removeprefix(f"{path}: ")
        if location == "SOURCE" and isinstance(error, ConfigError) and error.hint and "[inputs.tensors" in error.hint:
            error.hint = "Add --input NAME=batch,3,224,224 for each input, or --data FILE."
        if error.details is not None:
            error.details = name_options(error.details)
        if path == _NO_FILE and error.hint is not None:
            error.hint = error.hint.replace("the folder of the config", "the working directory")
            error.hint = error.hint.replace("model.task", "--task")
        error.locate(location.rstrip() if location != str(path) else "optexport export")
        raise
