"""Tests of error annotations and job summaries for GitHub Actions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from click.testing import Result
from markdown_it import MarkdownIt

from optexport.errors import printable
from optexport.report import github
from tests._helpers import exports
from tests._helpers.cli import Caller, config

# This rule takes a division for a multiplication.
WRONG = '[[transformations]]\nuse = "python:halves:Doubles"'


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_github_gets_summary_and_errors(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("text of an earlier step\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = call("run", config(more=WRONG if fails else ""), "--json")
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("text of an earlier step\n### mine.toml: parity ")
    assert ("parity failed" in text, "parity passed" in text) == (fails, not fails)
    assert "| graph |" in text
    assert "atol=" in text
    lines = [line for line in result.stderr.splitlines() if line.startswith("::error ")]
    assert len(lines) == fails
    if fails:
        assert "title=optexport%3A graph%2C output::at traced: " in lines[0]
        assert "would prove nothing" in lines[0]
    else:
        assert json.loads(result.stdout)["passed"]


def test_other_errors_are_one_annotation(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    result = call("run", config("halves:laod"))
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("::error ")]
    assert line.endswith('Did you mean "load"?')
    assert "%0A" in line


NAMES = ["lo|g%its,a:b", "po\noled::error::x", "a\r\n::error::y", "`a` <b> *c* _d_ [e](f) ~~g~~ &lt; \\| https://h"]
ODD_NAMES = f"""
class Odd(nn.Module):
    def forward(self, x):
        return {{name: x / (index + 2) for index, name in enumerate({NAMES!r})}}
"""


def run_odd_names(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, str]:
    """Runs a model whose outputs have odd names and fail; returns the result and the job summary."""
    module = tmp_path / "halves.py"
    module.write_text(module.read_text(encoding="utf-8") + ODD_NAMES, encoding="utf-8")
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = call("run", config("halves:Odd", more=WRONG))
    assert result.exit_code == 4
    return result, summary.read_text(encoding="utf-8")


def test_outputs_with_odd_names_are_one_annotation_each(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = run_odd_names(call, tmp_path, monkeypatch)
    commands = [line for line in result.stderr.splitlines() if line.lstrip().startswith("::")]
    titles = []
    for command in commands:
        match = re.fullmatch(r"::error title=([^:,]*)::(.*)", command)
        assert match is not None, command
        titles.append(unquote(match.group(1)))
    assert titles == [printable(f"optexport: graph, {name}") for name in NAMES]


def test_outputs_with_odd_names_are_one_table_row_each(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, summary = run_odd_names(call, tmp_path, monkeypatch)
    html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(summary)
    rows = ElementTree.fromstring(f"<html>{html}</html>").findall(".//tbody/tr")
    shown = [name.replace("\r", "\\r").replace("\n", "\\n") for name in NAMES]
    assert [row[1].text for row in rows] == shown * (len(rows) // len(NAMES))
    assert {len(row) for row in rows} == {8}
    assert [cell.tag for row in rows for cell in row[1].iter()] == ["td"] * len(rows), "no markup"


def test_nothing_is_printed_outside_of_github(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    assert "::error" not in call("run", config(more=WRONG)).stderr


def test_unwritable_summary_does_not_fail_the_run(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "not" / "mounted"))
    result = call("run", config())
    assert result.exit_code == 0
    assert "Cannot write the job summary" in result.stderr


@pytest.mark.slow
def test_summary_names_the_reference_of_a_fixed_tolerance() -> None:
    record = exports.exported().manifest.parity
    assert "Compared with the original in float64 on" in github.markdown(record, "x")
    first, *rest = record.bounds
    assert rest
    bounds = {first: record.bounds[first].model_copy(update={"atol": 1e-5})}
    mixed = record.model_copy(update={"bounds": bounds | {name: record.bounds[name] for name in rest}})
    text = github.markdown(mixed, "x").replace("\\\\", "")
    assert f"Compared with the original in float64, {first} in its own precision on" in text
