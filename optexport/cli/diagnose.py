"""The command ``optexport diagnose``, which finds the cause of a failed check."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo, stdout_to_stderr
from optexport.cli._group import Command, no_custom_code_option
from optexport.report.progress import show_progress


@click.command(cls=Command, examples=["optexport diagnose optexport.toml", "optexport diagnose build/my-model"])
@click.argument("path", metavar="CONFIG|BUNDLE", type=click.Path(path_type=Path, exists=True))
@no_custom_code_option
def diagnose(path: Path) -> None:
    """Find the cause of a failed check.

    Use this if run or verify ended with exit code 4. Given a CONFIG, it runs everything up to the checks and writes no
    bundle. Given a BUNDLE, it runs the files on their stored inputs, without the original model.

    It names the rule, the change and the first node whose values differ, and writes a folder with a script that
    reproduces the failure.
    """
    if path.is_dir():
        from optexport.diagnosis.bundle import diagnose_bundle

        echo(f"{path}: {diagnose_bundle(path)}")
        return
    from optexport.config.load import load_config

    load_config(path)
    with show_progress(True) as progress:
        from optexport.diagnosis import failure
        from optexport.pipeline import run as pipeline_run

        with stdout_to_stderr():
            result = pipeline_run.run(path, progress=progress, keep=False)
    echo(f"{path}: all checks pass: {failure.describe_margin(result.parity)}")
