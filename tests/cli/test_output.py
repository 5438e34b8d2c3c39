"""JSON output is one document, despite anything that model code prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._helpers.cli import MODULE, config
from tests.cli.test_main import ROOT

NOISE = """
import ctypes
import os

import halves

def load():
    print("of Python")
    os.write(1, b"to the descriptor")
    ctypes.CDLL(None).printf(b"of C, which keeps it until there is more")
    return halves.load()
"""

FORKS = """
import os
import sys

import halves

def load():
    if not os.fork():
        sys.exit(0)
    os.wait()
    return halves.load()
"""

AT_EXIT = """
import atexit

import halves

def load():
    atexit.register(print, "as Python ends")
    return halves.load()
"""


def run(folder: Path, code: str, *before: str) -> subprocess.CompletedProcess[str]:
    (folder / "halves.py").write_text(MODULE, encoding="utf-8")
    (folder / "noise.py").write_text(code, encoding="utf-8")
    (folder / "mine.toml").write_text(config("noise:load"), encoding="utf-8")
    return subprocess.run(
        [*before, sys.executable, "-m", "optexport", "run", "mine.toml", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_output_of_model_code_is_not_in_the_json(tmp_path: Path) -> None:
    """Only the output of Python's print was redirected."""
    done = run(tmp_path, NOISE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]
    for text in ("of Python", "to the descriptor", "of C, which"):
        assert text in done.stderr


@pytest.mark.slow
def test_output_at_interpreter_exit_is_not_in_the_json(tmp_path: Path) -> None:
    done = run(tmp_path, AT_EXIT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]
    assert "as Python ends" in done.stderr


@pytest.mark.slow
def test_closed_stdout_gives_no_traceback(tmp_path: Path) -> None:
    """The signal thread got the free file descriptor and raised an exception."""
    done = run(tmp_path, "from halves import load", "sh", "-c", 'exec "$@" >&-', "sh")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_process_forked_by_model_code_ends_without_a_traceback(tmp_path: Path) -> None:
    """The forked process ran the cleanup of its parent."""
    done = run(tmp_path, FORKS)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("verify", "nowhere"), ("run", "nowhere.toml")])
def test_error_is_printed_despite_a_full_disk(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The command printed two tracebacks."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "optexport", *arguments, "--json"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: nowhere")
    assert "Traceback" not in done.stderr
