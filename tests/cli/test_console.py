"""Control characters in names, files and configs do not reach the terminal."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from optexport.errors import printable
from optexport.report.console import printable_console
from tests._helpers.cli import CliRunner, cli, config

# Clears the screen, sets its title, deletes preceding text, and reverses the order of letters.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\b\b\u202egnp"
MODULE = f"""
import torch
from torch import nn
from optexport.transformations import Rule, Skip, Transformation

NAME = {HOSTILE!r}

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(NAME, nn.Linear(4, 3))
    def forward(self, x):
        return {{NAME: getattr(self, NAME)(x), "[bold]" + NAME: x + 1}}

class Skips(Rule):
    def match(self, graph_module, node):
        return Skip(NAME) if node.op == "call_module" else None
    def rewrite(self, graph_module, match):
        return []

class Spoils(Transformation):
    def transform(self, graph_module):
        with torch.no_grad():
            for parameter in graph_module.parameters():
                parameter += 1
        return graph_module

def fails(): raise KeyError(NAME)
"""


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@given(st.text())
def test_printable_text_is_harmless_and_has_the_same_lines(text: str) -> None:
    escaped = printable(text)
    assert is_harmless(escaped)
    assert escaped.count("\n") == text.count("\n")
    assert printable(escaped) == escaped


@given(st.text(" :#[]\n\terror", max_size=30))
def test_text_contains_no_commands_for_github_actions(text: str) -> None:
    """GitHub Actions runs lines that start with two colons, and "##[" anywhere, as commands."""
    lines = printable(text).splitlines()
    assert not any(line.strip().startswith("::") or "##[" in line for line in lines), text


def test_closed_pipe_raises_broken_pipe_and_does_not_exit() -> None:
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    with pytest.raises(BrokenPipeError):
        printable_console(file=file).print("a line")
    with contextlib.suppress(BrokenPipeError):  # for text that is still buffered
        file.close()


def _call(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli, arguments)
    assert "This is a bug" not in done.stderr
    assert is_harmless(done.stdout), repr(done.stdout)
    assert is_harmless(done.stderr), repr(done.stderr)
    return done.exit_code, done.stdout + done.stderr


@pytest.mark.slow
def test_run_and_bundle_print_hostile_names_as_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_names.py").write_text(MODULE, encoding="utf-8")
    rules = 'transformations = [{ use = "python:hostile_names:Skips" }]'
    text = config("hostile_names:Named", more=rules)
    (tmp_path / "mine.toml").write_text(text.replace('["pt2"]', '["onnx"]'))  # .pt2 files do not support such names
    code, output = _call(tmp_path, monkeypatch, "run", "mine.toml", "--dump", "graphs")
    assert (code, "u202e" in output) == (0, True), output
    graphs = [*(tmp_path / "build" / "model").glob("graph_*.txt"), *(tmp_path / "graphs").iterdir()]
    assert len(graphs) == 4
    for graph in graphs:  # these files contained the names unescaped
        assert is_harmless(graph.read_text(encoding="utf-8")), graph
    assert _call(tmp_path, monkeypatch, "verify", "build/model")[0] == 0
    assert _call(tmp_path, monkeypatch, "bench", "build/model", "--rounds", "1")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "rule", "code"), [("Named", "Spoils", 4), ("fails", "Skips", 3), ("Named", "Missing", 2)]
)
def test_errors_print_hostile_names_as_plain_text(
    source: str, rule: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_names.py").write_text(MODULE, encoding="utf-8")
    rules = f'transformations = [{{ use = "python:hostile_names:{rule}" }}]'
    (tmp_path / "mine.toml").write_text(config(f"hostile_names:{source}", more=rules))
    assert _call(tmp_path, monkeypatch, "run", "mine.toml")[0] == code


@pytest.mark.sample(1)
@pytest.mark.parametrize("key", ["model.source", "model.task", "export.output", "tracking.experiment", "new.key"])
def test_hostile_config_is_checked_in_plain_text(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    escaped = HOSTILE.encode("unicode_escape").decode().replace("\\x1b", "\\u001b").replace("\\x07", "\\u0007")
    escaped = escaped.replace("\\x08", "\\b")
    (tmp_path / "mine.toml").write_text(f'{key} = "{escaped}"\n')
    assert _call(tmp_path, monkeypatch, "check", "mine.toml")[0] == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["check", "run --json"])
def test_config_prints_no_commands_for_github_actions(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull request could annotate files through the check of a config."""
    source = "python:a\\n::error::x ##[error]y\\n  ::warning::z:make"
    (tmp_path / "mine.toml").write_text(f'[model]\nsource = "{source}"\n[inputs.dynamic]\n"a\\n::error::b" = [2, 1]\n')
    code, output = _call(tmp_path, monkeypatch, *command.split(), "mine.toml")
    assert code == 2
    assert "error::" in output
    assert not any(line.strip().startswith("::") or "##[" in line for line in output.splitlines())


def test_name_between_colons_is_not_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add_column("rule")
    table.add_row("python:fire:Mine")
    printable_console().print(table, "python:two:make")
    shown = capsys.readouterr().out
    assert "python:fire:Mine" in shown
    assert "python:two:make" in shown
