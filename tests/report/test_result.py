"""Texts of a result in Python: its repr, its summary, and its page in a notebook."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import optexport
from optexport.report import terminal
from tests._helpers import exports
from tests._helpers.cli import CliRunner, cli
from tests._helpers.tampering import tamper_onnx


def test_repr_is_one_line_with_the_verdict() -> None:
    result = exports.exported()
    assert re.fullmatch(
        r"Result\(passed, \d+ cases, at most \d+ % of the tolerance used, torchscript, onnx, pt2 in .+\)", repr(result)
    )


def test_summary_is_the_text_of_the_command_without_colors() -> None:
    result = exports.exported()
    summary = result.summary()
    assert "\nPASSED  3 files" in summary
    assert result.seconds is not None
    assert f"\ntime     {result.seconds:.0f} s\nbundle   {result.output}\n" in summary
    assert "\x1b" not in summary


def test_notebook_shows_the_summary_as_html() -> None:
    html = exports.exported()._repr_html_()
    assert html.startswith("<pre")
    text = re.sub("<[^>]+>", "", html).replace("&gt;", ">").replace("&lt;", "<").replace("&#x27;", "'")
    assert text.split() == exports.exported().summary().split()


def test_rules_that_found_nothing_passes_and_cases_are_listed_on_request() -> None:
    result = exports.exported()
    idle = [rule.rule for rule in result.manifest.transformations if not rule.changes and not rule.near_misses]
    assert idle
    short, long = result.summary(), result.summary(verbose=True)
    assert f"{len(idle)} rules found nothing" in short
    assert [rule for rule in idle if rule in short] == []
    assert [rule for rule in idle if rule not in long] == []
    assert "format passes, onnx" in long
    assert "format passes" not in short
    assert f"Parity on {len(result.manifest.parity.cases)} cases\n" in short
    assert "  cases: traced; " in long


def test_terminals_of_80_columns_get_every_number(tmp_path: Path) -> None:
    result = optexport.export(
        exports.block(),
        exports.batch(),
        tmp_path / "bundle",
        dynamic=exports.DYNAMIC,
        formats="onnx",
        precision={"onnx": "int8-rows"},
        metrics={"cosine": {"min": 0.9}},
    )
    text = io.StringIO()
    terminal.show(result, Console(file=text, width=80, force_terminal=True, color_system=None), verbose=True)
    lines = text.getvalue().splitlines()
    paths = ("bundle ", "report ", "Precision")
    assert [line for line in lines if len(line.rstrip()) > 80 and not line.startswith(paths)] == []
    assert not any("…" in line for line in lines)
    (heading,) = [line for line in lines if "minimum" in line]
    assert heading.split() == ["target", "metric", "value", "minimum", "count"]
    lowered = [line for line in lines if line.startswith(" onnx (int8-rows)") and "gates" in line]
    ordinary = max(output.max_abs for output in result.parity[-1].outputs)
    assert all(float(line.split()[-3]) <= ordinary * 1.1 for line in lowered)  # not that of values 64 times as large
    assert lowered


def test_comparisons_have_one_line_each() -> None:
    texts = [repr(target) for target in exports.exported().parity]
    assert texts[1] == "TargetParity(graph, passed, 2 of 2 outputs within tolerance)"


def test_a_verification_reads_like_its_command() -> None:
    output = exports.exported().output
    checked = optexport.verify(output)
    assert repr(checked) == f"Verified(passed, torchscript, onnx, onnx-optimized, pt2 in {output})"
    assert checked.summary() == CliRunner().invoke(cli, ["verify", str(output)]).stdout
    assert "OK (files unchanged; stored outputs reproduced by torchscript, onnx" in checked._repr_html_()


def test_a_failed_verification_reads_like_its_command(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    tamper_onnx(bundle / "model.onnx")
    exports.reseal(bundle, "model.onnx")
    checked = optexport.verify(bundle)
    assert repr(checked).startswith("Verified(failed, ")
    assert isinstance(checked.failure, optexport.ParityError)
    assert checked.summary() == CliRunner().invoke(cli, ["verify", str(bundle)]).stderr
    assert "the files do not reproduce the stored outputs" in checked._repr_html_()


def test_a_bundle_describes_itself() -> None:
    result = exports.exported()
    bundle = optexport.Bundle.load(result.output)
    lines = dict(re.findall(r"^(\S.*?)  +(.*)$", bundle.summary(), re.MULTILINE))
    assert lines["Bundle"] == str(result.output)
    assert lines["Open file"] == "model.onnx (the bundle has torchscript, onnx, pt2)"
    assert lines["Dynamic axes"].startswith("batch ")
    assert [spec.name in lines["Inputs"] for spec in result.manifest.inputs] == [True] * len(result.manifest.inputs)
    with pytest.raises(optexport.ConfigError, match="a file, not the folder of a bundle"):
        optexport.Bundle.load(result.files["onnx"])
    html = bundle._repr_html_()
    assert html.startswith("<pre")
    assert "model.onnx" in html
