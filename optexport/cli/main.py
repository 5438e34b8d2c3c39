"""The group of all commands. Each command imports its own libraries, so that ``--help`` is fast."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import tempfile
from pathlib import Path

import click
from rich_click import RichCommandPanel

from optexport._version import __version__
from optexport.cli._console import clean_warnings
from optexport.cli._group import Group, debug_option
from optexport.cli.batch import batch
from optexport.cli.bench import bench
from optexport.cli.check import check
from optexport.cli.diagnose import diagnose
from optexport.cli.diff import diff
from optexport.cli.export import export
from optexport.cli.init import init
from optexport.cli.lock import lock
from optexport.cli.new_format import new_format
from optexport.cli.new_rule import new_rule
from optexport.cli.passes import passes
from optexport.cli.predict import predict
from optexport.cli.promote import promote
from optexport.cli.report import report
from optexport.cli.reproduce import reproduce
from optexport.cli.rollback import rollback
from optexport.cli.run import run
from optexport.cli.schema import schema
from optexport.cli.sign import sign
from optexport.cli.transformations import transformations
from optexport.cli.upload import upload
from optexport.cli.verify import verify

# rich-click joins the lines of a paragraph.
_EPILOG = """Exit codes:
  0    success; for run: exported and verified
  1    disk full, program ended by the model's code, or a bug in optexport
  2    the config or the command line is wrong
  3    the model could not be loaded or traced
  4    a check failed: results differ, or a bundle was changed
  5    a transformation, an export or a measurement failed
  6    a gate failed
  7    tracking failed; the bundle on disk is complete
  130  interrupted (143: by SIGTERM, 129: by SIGHUP)""".replace("\n", "\n\n")
_HELP = {
    "theme": "default-slim",
    "commands_before_options": True,
    "text_markup": None,  # a table of a config is written as [tune]
    "text_emojis": False,
    "text_paragraph_linebreaks": "\n\n",
    "padding_helptext_first_line": (0, 0, 1, 0),
    "default_string": "(default: {})",
}


@click.group(
    cls=Group,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "rich_help_config": _HELP},
)
@debug_option
@click.version_option(__version__, prog_name="optexport", help="Show the version and exit.")
def cli() -> None:
    """Export PyTorch and transformers models to ONNX, TorchScript and .pt2, and verify the files.

    Start with: optexport export ./my-model
    """
    clean_warnings()


_SECTIONS = {
    "Export": (export, init, check, run, lock, batch),
    "Inspect": (verify, diagnose, bench, diff, report, reproduce),
    "Deploy": (predict, sign, upload, promote, rollback),
    "Extend": (transformations, passes, new_rule, new_format, schema),
}
for _title, _commands in _SECTIONS.items():
    cli.add_panel(RichCommandPanel(_title, commands=[str(command.name) for command in _commands]))
    for _command in _commands:
        cli.add_command(_command)


def main() -> None:
    """Runs the command line."""
    _silence_libraries()
    try:
        Path.home()
    except RuntimeError:  # containers may use a user id that the system does not know, but libraries need a home
        os.environ["HOME"] = _private_folder()
    # Imports and traces create many small, long-lived objects: garbage collection took a tenth of a run's time.
    gc.set_threshold(20_000, 50, 100)
    limit_spinning()
    cli()


def limit_spinning() -> None:
    """Makes idle threads of torch sleep early, unless the user has configured how they wait.

    By default they spin 30 times as long. If another process needs the cores, a run then takes several times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _private_folder() -> str:
    """Returns a home that only this user can write, the same for every run if possible.

    Models and results in a cache that others can write would not be trustworthy.
    """
    folder = Path(tempfile.gettempdir(), f"optexport-{os.getuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return str(folder)
    return tempfile.mkdtemp(prefix="optexport-")


def _silence_libraries() -> None:
    """Silences messages of the libraries, unless the user has configured them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
