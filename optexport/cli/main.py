"""The group of all commands. Each command imports its own libraries, so that ``--help`` is fast."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import tempfile
from pathlib import Path

import click

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

_EPILOG = """\b
Exit codes:
  0    success; for run: exported and verified
  1    disk full, program ended by the model's code, or a bug in optexport
  2    the config or the command line is wrong
  3    the model could not be loaded or traced
  4    a check failed: results differ, or a bundle was changed
  5    a transformation, an export or a measurement failed
  6    a gate failed
  7    tracking failed; the bundle on disk is complete
  130  interrupted (143: by SIGTERM, 129: by SIGHUP)"""


@click.group(cls=Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@debug_option
@click.version_option(__version__, prog_name="optexport", help="Show the version and exit.")
def cli() -> None:
    """Export PyTorch and transformers models to ONNX, TorchScript and .pt2, and verify the files.

    Start with: optexport init ./my-model, then optexport run optexport.toml.
    """
    clean_warnings()


cli.add_section("Prepare a run", init, check, schema, lock, transformations, passes, new_rule)
cli.add_section("Run", export, run, batch, diagnose, reproduce)
cli.add_section("Use a bundle", verify, predict, bench, report, diff, sign)
cli.add_section("Use MLflow", upload, promote, rollback)


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
