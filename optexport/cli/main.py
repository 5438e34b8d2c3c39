"""The command line. Each command imports its own libraries, so that ``--help`` is fast."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
import tempfile
import textwrap
from pathlib import Path

import click

from optexport._version import __version__
from optexport.cli._console import clean_warnings, console, echo, prints_aside, show_progress
from optexport.cli._group import Group, debug_option, json_option, junit_option, no_custom_code_option, print_json
from optexport.cli.batch import batch
from optexport.cli.bench import bench
from optexport.cli.lock import lock
from optexport.cli.predict import predict
from optexport.cli.report import diff, report
from optexport.cli.reproduce import reproduce
from optexport.cli.sign import sign
from optexport.cli.tracking import promote, rollback, upload
from optexport.cli.verify import verify
from optexport.errors import ConfigError, OptexportError

_EPILOG = """\b
Exit codes:
  0    done; for run: exported and proven
  1    the disk is full, a model's code ended the program, or a defect
  2    the config, or the call, is wrong
  3    the model could not be loaded or traced
  4    the proof failed: results differ, or a bundle was changed
  5    a transformation, an export or a measurement failed
  6    a gate failed
  7    tracking failed; the bundle is whole on disk
  130  interrupted (143 by SIGTERM, 129 by SIGHUP)"""


@click.group(cls=Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@debug_option
@click.version_option(__version__, prog_name="optexport")
def cli() -> None:
    """Turns a PyTorch or transformers model into an optimized, portable one, with proof that it is the same."""
    clean_warnings()


cli.add_command(batch)
cli.add_command(bench)
for command in (upload, promote, rollback):
    cli.add_command(command)
cli.add_command(predict)
cli.add_command(lock)
cli.add_command(reproduce)
cli.add_command(report)
cli.add_command(diff)
cli.add_command(sign)
cli.add_command(verify)
_CONFIG = click.argument("config", type=click.Path(path_type=Path, dir_okay=False))


@cli.command()
@_CONFIG
@click.option("--without", multiple=True, metavar="RULE", help="Leave a rule out; may be given more than once.")
@click.option("--tune", is_flag=True, help="Search for the rules and passes that make the files faster.")
@click.option("--baseline", is_flag=True, help="Write the untransformed export too, to OUTPUT-baseline.")
@click.option("--dump", type=click.Path(path_type=Path, file_okay=False), help="Write every graph to this folder.")
@click.option("--locked", is_flag=True, help="Refuse what is not in CONFIG.lock (optexport lock).")
@no_custom_code_option
@junit_option
@json_option
def run(
    config: Path,
    without: tuple[str, ...],
    tune: bool,
    baseline: bool,
    dump: Path | None,
    locked: bool,
    junit: Path | None,
    as_json: bool,
) -> None:
    """Transform, prove and export the model that CONFIG names."""
    from optexport._utils import packages
    from optexport.bundle.layout import output_folders
    from optexport.config.load import load_config
    from optexport.pipeline import lockfile
    from optexport.report import github
    from optexport.report import junit as report_junit

    try:
        read = load_config(config, without)  # reports mistakes in the config before the slow import of torch
        if locked and read.generation is None:  # reports packages that transformers would refuse at import
            lockfile.check_surroundings(lockfile.read(config), read, config, packages.versions())
        packages.check()
    except ConfigError as error:
        report_junit.start(junit, [config])
        github.publish(config.name, None, error)
        report_junit.write(junit, None, error)
        raise
    report_junit.start(junit, [config, *output_folders(read.output_path(config.parent))])
    if read.generation is not None:
        given = {"--tune": tune, "--baseline": baseline, "--dump": dump is not None, "--locked": locked}
        given |= {"--junit": junit is not None}
        _run_generation(config, without, [option for option, value in given.items() if value], as_json=as_json)
        return
    try:
        with show_progress(quiet=as_json) as progress:
            from optexport.pipeline import run as pipeline_run
            from optexport.report import terminal

            # A model's own code may print; standard output is reserved for the result.
            with prints_aside():
                result = pipeline_run.run(
                    config, without=without, tune=tune, baseline=baseline, dump=dump, locked=locked, progress=progress
                )
    except OptexportError as error:
        github.publish(config.name, None, error)
        report_junit.write(junit, None, error)
        raise
    github.publish(config.name, result.manifest.parity, result.failure)
    report_junit.write(junit, result.manifest.parity, result.failure)
    if as_json:
        print_json(terminal.as_json(result))
    else:
        terminal.show(result, console())
    if result.failure is not None:
        raise result.failure


def _run_generation(config: Path, without: tuple[str, ...], refused: list[str], *, as_json: bool) -> None:
    """Exports the parts of a generative model, and prints their results."""
    if refused:
        raise ConfigError("it does not go with [generation]", location=refused[0], hint="Leave it out.")
    with show_progress(quiet=as_json) as progress:
        from optexport.generation import run, summary

        with prints_aside():
            result = run.run_generation(config, without=without, progress=progress)
    if as_json:
        print_json(summary.as_json(result))
    else:
        summary.show(result, console())
    for part in result.parts.values():
        if part.failure is not None:
            raise part.failure


@cli.command()
@click.argument(
    "configs", nargs=-1, required=True, metavar="CONFIG...", type=click.Path(path_type=Path, dir_okay=False)
)
@no_custom_code_option
def check(configs: tuple[Path, ...]) -> None:
    """Check the whole of each CONFIG, without loading anything."""
    from optexport.config.checks import check_here, open_question
    from optexport.config.load import load_config

    mistakes = []
    for config in configs:
        try:
            read = load_config(config)
            check_here(read, config)
        except ConfigError as error:  # the other configs are checked too
            mistakes.append(error)
            continue
        echo(f"{config}: good. Rules: {', '.join(rule.use for rule in read.rules()) or 'none'}.")
        if (question := open_question(read)) is not None:
            echo(question)
    if len(mistakes) > 1:
        told = "\n".join(textwrap.indent(str(mistake), "  ") for mistake in mistakes)
        raise ConfigError(f"{len(mistakes)} of {len(configs)} configs are wrong\n{told}")
    for mistake in mistakes:
        raise mistake


@cli.command()
def schema() -> None:
    """Print the JSON schema of a config, for editors."""
    from optexport.config.json_schema import config_schema

    click.echo(json.dumps(config_schema(), indent=2))


@cli.command()
@click.argument("source", required=False, default=".")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("optexport.toml"),
    show_default=True,
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def init(source: str, output: Path, force: bool) -> None:
    """Write a commented starter config for the model at SOURCE.

    SOURCE is a folder (the default is this one), a hub id, package:NAME/PATH, python:module:factory,
    mlflow:models:/NAME@ALIAS, a .pt2 file, or a TorchScript file (.pt, .ts, .jit).
    """
    from optexport.cli.init_config import GUESS, GUESSED_SIZE, starter_config
    from optexport.config.checks import check_extras
    from optexport.config.load import parse_config
    from optexport.config.source import missing_model, source_folder

    if output.exists() and not force:
        raise click.UsageError(f"{output} is there already. Give another --output, or --force.")
    if not output.parent.is_dir():
        raise click.UsageError(f"there is no folder {output.parent} to write {output.name} in.")
    if output.exists() and not output.is_file():
        raise click.UsageError(f"{output} is no file that can be replaced.")
    if output.parent != Path() and os.path.exists(source) and not os.path.isabs(source):
        source = os.path.relpath(source, output.parent)  # a config resolves it from its own folder
    text = starter_config(source, output.parent)
    config = parse_config(text, output)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}", location=str(output)) from error
    echo(f"Wrote {output}. Read it, then: optexport run {output}")
    if GUESS in text or GUESSED_SIZE in text:
        echo(f"The inputs are a guess: edit [inputs] in {output}.")
    lies = source_folder(source, output.parent)
    if lies is not None and (missing := missing_model(lies)) is not None:
        echo(f"{source} {missing[0]}: edit model.source. {missing[1]}")
    try:
        check_extras(config, output)
    except ConfigError as error:  # the written config is valid without the extras
        echo(str(error))


@cli.command()
@json_option
def transformations(as_json: bool) -> None:
    """List the built-in rules, and those of installed packages."""
    from optexport.cli import listing

    if as_json:
        print_json(listing.rules())
    else:
        echo(listing.rules_as_text())


@cli.command()
@json_option
def passes(as_json: bool) -> None:
    """List the ways in which files can be written."""
    from optexport.cli import listing

    if as_json:
        print_json(listing.passes())
    else:
        echo(listing.passes_as_text())


@cli.command("new-rule")
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    help="Where to write it; by default here.",
)
def new_rule(name: str, folder: Path) -> None:
    """Write a rule to start from, its test and its config."""
    from optexport.cli.new_rule import write_rule

    rule, test, config = write_rule(name, folder)
    echo(f"Wrote {rule}, {test} and {config}. Then:")
    echo(f"  pip install pytest; python -m pytest {test}; optexport run {config}")


@cli.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@no_custom_code_option
def diagnose(path: Path) -> None:
    """Say what a failed proof is to be blamed on.

    Runs a CONFIG up to the proof, or the files of a BUNDLE on their stored inputs; names the rule, its change and the
    place in the graph or the file, and leaves a folder with what shows it again.
    """
    from optexport.config.load import load_config

    if path.is_dir():
        from optexport.diagnosis.bundle import diagnose_bundle

        echo(f"{path}: {diagnose_bundle(path)}")
        return
    load_config(path)
    with show_progress(quiet=False) as progress:
        from optexport.diagnosis import reproduction
        from optexport.pipeline import run as pipeline_run

        with prints_aside():
            result = pipeline_run.run(path, progress=progress, keep=False)
    echo(f"{path}: {reproduction.describe_margin(result.parity)}")


def main() -> None:
    """Runs the command line."""
    _quieten()
    try:
        Path.home()
    except RuntimeError:  # containers may use a user id that the system does not know, but libraries need a home
        os.environ["HOME"] = _private_folder()
    # Imports and traces create many small, long-lived objects: garbage collection took a tenth of a run's time.
    gc.set_threshold(20_000, 50, 100)
    cli()


def _private_folder() -> str:
    """Returns a home that only this user can write, the same for every run if possible.

    Models and results in a cache that others can write would not be trustworthy.
    """
    location = Path(tempfile.gettempdir(), f"optexport-{os.getuid()}")
    with contextlib.suppress(OSError):
        location.mkdir(mode=0o700, exist_ok=True)
        found = location.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return str(location)
    return tempfile.mkdtemp(prefix="optexport-")


def _quieten() -> None:
    """Silences messages of the libraries, unless the user has configured them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
