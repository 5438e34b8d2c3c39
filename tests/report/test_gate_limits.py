"""Tests how the terminal and the reports show the limits of ``[gate]``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from optexport.bundle.measurements import GainRecord
from optexport.report import github
from tests._helpers import exports
from tests._helpers.cli import Caller, config


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


@pytest.fixture
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


def read_html(summary: Path) -> ElementTree.Element:
    html = MarkdownIt("commonmark").enable("table").render(summary.read_text(encoding="utf-8"))
    return ElementTree.fromstring(f"<html>{html}</html>")


def text_of(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


@pytest.mark.nightly
def test_met_limits_are_shown_everywhere(call: Caller, tmp_path: Path, summary: Path) -> None:
    more = "[bench]\nrounds = 12\n[gate]\nmax_size_mb = 5\nmax_latency_ms = { onnx = 60000 }\nmin_speedup = 1e-6"
    junit = tmp_path / "parity.xml"
    result = call("run", config(more=more).replace('"pt2"', '"onnx"'), "--junit", str(junit))
    assert result.exit_code == 0, result.stderr
    shown = dict(re.findall(r"^  gate (.*?): (.*)$", result.stdout, re.MULTILINE))
    gates = {name.partition(",")[0]: text.partition(" of ")[2] for name, text in shown.items()}
    assert gates == {"max_size_mb": "at most 5", "max_latency_ms": "at most 60000", "min_speedup": "at least 1e-06"}
    onnx_mb = (tmp_path / "build/model/model.onnx").stat().st_size / 1e6
    assert shown["max_size_mb, onnx"] == f"{onnx_mb:.4g} of at most 5"
    tests = [test for test in ElementTree.parse(junit).iter("testcase") if "gate" in test.get("name", "")]
    assert [test.findtext("system-out") for test in tests] == [f"gate {name}: {text}" for name, text in shown.items()]
    html = (tmp_path / "build/model/report.html").read_text(encoding="utf-8")
    facts = re.findall(r"<dt>Gate (\w+)</dt><dd>(\S+)<small>(\w+), (.*)</small>", html)
    assert {f"{gate}, {name}": f"{value} of {bound}" for gate, value, name, bound in facts} == shown
    rows = [[text_of(cell) for cell in row] for row in read_html(summary).iter("tr")]
    assert ["max_size_mb", "onnx", f"{onnx_mb:.4g}", "at most 5"] in rows
    assert ["model.onnx", "onnx"] in [row[:2] for row in rows]


def test_missed_limits_are_a_list_on_github(call: Caller, summary: Path) -> None:
    assert call("run", config(more="[gate]\nmax_size_mb = 1e-6")).exit_code == 6
    page = read_html(summary)
    paragraphs = [text_of(paragraph) for paragraph in page.iter("p")]
    assert "[gate]: the exported files miss the gates" in paragraphs
    items = [text_of(item) for item in page.iter("li")]
    assert items
    assert all(re.fullmatch(r"max_size_mb: \S+ has \S+ MB, maximum 1e-06", item) for item in items)


@pytest.mark.parametrize(("page", "shown"), [("http://mlflow:5000/#/runs/1", True), ("mlflow ui\nhttp://x", False)])
def test_summary_has_the_speed_and_the_page_on_a_server(page: str, shown: bool) -> None:
    gain = GainRecord(
        format="onnx", ms=1.0, original_ms=1.5, speedup=1.5, low=1.4, high=1.6, sizes="batch=4", threads=1
    )
    result = replace(exports.exported(), run_page=page, gain=(gain,))
    text = github.markdown(result.manifest.parity, "x", None, result)
    assert (f"MLflow: <{page}>" in text) is shown
    assert "| 1.50 (1.40 to 1.60) times as fast (1 ms per call) |" in text
