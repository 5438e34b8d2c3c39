"""``optexport diagnose`` on configs and bundles."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from optexport.cli.main import cli
from tests._helpers import exports
from tests._helpers.cli import Caller, config, message
from tests.diagnosis.failures import weight_of


@pytest.mark.slow
def test_diagnose_runs_a_config_without_writing_a_bundle(tmp_path: Path) -> None:
    call = Caller(tmp_path)
    result = call("diagnose", config())
    assert result.exit_code == 0, result.stderr
    assert "all targets pass (original, graph, pt2); worst output: " in result.stdout
    assert not (tmp_path / "build" / "model").exists()
    text = message(call("diagnose", config(more='transformations = [{ use = "python:halves:Doubles" }]')), 4)
    assert "The rule python:halves:Doubles caused the difference. It changed " in text
    folder = tmp_path / "build" / "model-failure"
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["model-failure"]
    assert "python:halves:Doubles" in (folder / "config.toml").read_text()
    assert str(folder) in text


def test_diagnose_explains_a_bundle(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    result = CliRunner().invoke(cli, ["diagnose", str(bundle)])
    assert result.exit_code == 0, result.stderr
    assert "all targets pass" in result.stdout
    weight_of("norm.bias", lambda bias: 2 * bias)(bundle / "model.onnx")
    failed = CliRunner().invoke(cli, ["diagnose", str(bundle)])
    first, second, *_ = failed.stderr.splitlines()
    assert re.fullmatch(r"FAILED  onnx: hidden is off by \d.\de[+-]\d\d, tolerance \d.\de-\d\d \(case: traced\)", first)
    assert second.startswith("FAILED  onnx-optimized: hidden is off by ")
    text = message(failed, 4)
    assert "The bundle is damaged, which may be the cause: " in text
    assert "model.onnx: the file was changed after the bundle was written." in text
    assert "First difference: layer_norm" in text
    assert "norm.bias" in text
    assert (tmp_path / "bundle-failure" / "reproduce.py").is_file()
    assert "the folder is not a bundle" in message(CliRunner().invoke(cli, ["diagnose", str(tmp_path)]), 2)
