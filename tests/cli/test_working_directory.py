"""A working directory that was removed gives an error message of optexport."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from optexport.cli.main import cli
from tests._helpers.cli import MODULE, config
from tests.cli.test_main import ROOT


def test_removed_working_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was reported as a defect."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    done = CliRunner().invoke(cli, ["check", "mine.toml"])
    monkeypatch.chdir(tmp_path)
    assert (done.exit_code, "the working directory does not exist any more" in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_removed_directory_is_reported_before_torch_exits(tmp_path: Path) -> None:
    """Libraries of torch exit with an unrelated message."""
    folder = tmp_path / "gone"
    folder.mkdir()
    (tmp_path / "halves.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(config(), encoding="utf-8")
    program = "import os; os.rmdir(os.getcwd()); from optexport.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(tmp_path / "mine.toml")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "the working directory does not exist any more" in done.stderr) == (2, True), done.stderr
