"""Exit codes are correct, even if model code exits or leaves threads running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._helpers.cli import MODULE, config
from tests.cli.test_main import ROOT, python

LEAVES_A_THREAD = """
import threading

import halves

def load():
    threading.Thread(target=threading.Event().wait, name="sends figures").start()
    return halves.{makes}
"""


@pytest.mark.slow
def test_model_code_that_exits_gives_exit_code_1(tmp_path: Path) -> None:
    """The exit code was 0, which means success."""
    (tmp_path / "leaving.py").write_text("import os\n\ndef load():\n    os._exit(0)\n")
    (tmp_path / "mine.toml").write_text('[model]\nsource = "python:leaving:load"\n[export]\noutput = "build"\n')
    done = python("-m", "optexport", "run", "mine.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("Error: the model's code ended the program before the command was finished\n")


@pytest.mark.slow
def test_closed_output_pipe_is_not_a_defect() -> None:
    """``optexport transformations | head -0`` closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "optexport", "transformations"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    finally:
        os.close(writing)
    assert "This is a bug" not in done.stderr


@pytest.mark.slow
def test_exit_does_not_look_for_garbage() -> None:
    """It took seconds after the summary."""
    code = """
import atexit, gc, sys
from optexport.__main__ import main

sys.argv = ["optexport", "--version"]
atexit.register(lambda: print(gc.get_freeze_count(), file=sys.stderr))
main()
"""
    done = python("-c", code)
    assert done.returncode == 0
    assert int(done.stderr) > 10_000


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(("makes", "code"), [("load()", 0), ("Forks()", 3)])
def test_thread_of_model_code_does_not_block_the_exit(makes: str, code: int, tmp_path: Path) -> None:
    """Python waits for such a thread forever, which blocked the CI job."""
    (tmp_path / "halves.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "leaving.py").write_text(LEAVES_A_THREAD.format(makes=makes), encoding="utf-8")
    (tmp_path / "mine.toml").write_text(config("leaving:load"), encoding="utf-8")
    done = python("-W", "default", "-m", "optexport", "run", "mine.toml", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith("optexport ended, but the model's code left threads running: 'sends figures'\n")
