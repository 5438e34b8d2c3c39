"""Texts of a result in Python: its repr, its summary, and its page in a notebook."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import optexport
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
    assert f"{len(result.manifest.parity.cases)} cases: traced" in long


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
