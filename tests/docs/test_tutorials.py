"""Runs every block of the tutorials, in order, in an empty folder.

- A block after ``<!-- file: NAME -->`` is written to that file. A quoted block is written by a command of the tutorial.
- A ``console`` block is run. Its commands must print the lines shown, apart from measured numbers. ``...`` stands for
  any lines.
- A ``python`` block is run, and must print the lines of its comments.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests._helpers.cli import CliRunner, cli
from tests.docs.pages import ROOT

TUTORIALS = [ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
_LONG = ("nightly-batch", "own-rule", "text-encoder", "vision")  # by a minute or more on a slow machine

_BLOCK = re.compile(r"(?:<!-- (\w+): (\S+).*? -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PROGRESS = re.compile(r"^ *\d+(?:/\d+)? .+ \d+\.\d s$")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?|-?\d+e[-+]\d+|\d+(?= %)|\b[0-9a-f]{12,}\b")


def _outline(text: str) -> list[str]:
    """Returns lines without progress, trailing blanks, widths of columns and values of numbers."""
    lines = [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines() if not _PROGRESS.match(line)]
    return [line for line in lines if line.strip("-─━╌ ")]


def _assert_shown(shown: str, output: str, command: str) -> None:
    parts = [".*" if line == "..." else re.escape(line) + "\n" for line in _outline(shown)]
    text = "".join(f"{line}\n" for line in _outline(output))
    assert re.fullmatch("".join(parts), text, re.DOTALL), f"{command} printed:\n{output}"


class Session:
    """Runs commands in a folder. Commands of optexport run in this process, because it has imported torch."""

    def __init__(self) -> None:
        self.exit_code = 0

    def run(self, command: str) -> str:
        if command == "echo $?":
            code, self.exit_code = self.exit_code, 0
            return f"{code}\n"
        assert self.exit_code == 0, f"before {command}: exit code {self.exit_code}"
        words = shlex.split(command)
        if words[0] == "optexport" and not {">", "|", "&&"} & set(words):
            result = CliRunner().invoke(cli, words[1:])
            self.exit_code, output = result.exit_code, result.output
        else:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
            self.exit_code, output = done.returncode, done.stdout + done.stderr
        self.failure = f"{command}\n{output}"
        return output


def run_console(block: str, session: Session) -> None:
    for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        output = session.run(command)
        if shown.strip():
            _assert_shown(shown, output, command)


def _run_python(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    exec(block, {"__name__": "__main__"})
    expected = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    _assert_shown("\n".join(expected), capsys.readouterr().out, block)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.nightly if page.stem in _LONG else pytest.mark.slow)
        for page in TUTORIALS
    ],
)
def test_tutorial_runs_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = page.read_text(encoding="utf-8")
    if "examples/" in text:
        shutil.copytree(
            ROOT / "examples", "examples", ignore=shutil.ignore_patterns("build", "mlflow.db", "mlartifacts")
        )
    session = Session()
    blocks = _BLOCK.findall(text)
    assert len(blocks) == text.count("\n```") / 2
    for kind, name, language, block in blocks:
        if kind == "file":
            Path(name).write_text(block, encoding="utf-8")
        elif language == "console":
            run_console(block, session)
        elif language == "python" and kind != "quote":
            _run_python(block, capsys)
        else:
            assert kind == "quote", f"{language} blocks need a file name: {block}"
    assert session.exit_code == 0, session.failure


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
