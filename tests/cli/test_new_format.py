"""``optexport new-format``, the guide to writing formats, and formats from installed packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from optexport.cli.main import cli
from optexport.cli.new_format import write_format

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "write-formats.md").read_text(encoding="utf-8")
MODEL = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
"""
CONFIG = """
[model]
source = "python:mine:build"
[inputs.tensors.input]
shape = ["batch", 4]
[inputs.dynamic]
batch = [1, 64]
[parity]
effort = "quick"
[export]
formats = ["plain"]
output = "bundle"
[gate]
max_size_mb = { plain = 1 }
[tracking]
enabled = false
"""


def _python(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _optexport(folder: Path, *arguments: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from optexport.cli.main import main; main()"
    return _python(folder, "-c", code, *arguments)


@pytest.mark.slow
def test_new_format_passes_its_test(tmp_path: Path) -> None:
    *_, test = write_format("plain", tmp_path)
    assert "1 passed" in _python(test.parent, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name)


def _install(folder: Path) -> Path:
    """Writes the files that pip installs for a package with a format; returns its module."""
    _, module, _ = write_format("plain", folder)
    package = folder / "optexport_plain-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: optexport-plain\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[optexport.formats]\nplain = optexport_plain:PlainFormat\n")
    return module.rename(folder / module.name)


def test_broken_format_of_a_package_fails_only_where_it_is_named(tmp_path: Path) -> None:
    _install(tmp_path).write_text("raise RuntimeError('broken')")
    code = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
from optexport.errors import ConfigError
from optexport.exporters import registry
print(registry.list_suffixes(), registry.is_format("plain"))
for forbidden in ("0", "1"):
    os.environ["OPTEXPORT_NO_CUSTOM_CODE"] = forbidden
    try:
        registry.get_format("plain")
    except ConfigError as error:
        print(error.message)
"""
    suffixes, broken, forbidden = _python(tmp_path, "-c", code).splitlines()
    assert suffixes == "('.onnx', '.pt', '.pt2', '.xml') True"
    assert broken == "the format plain cannot be imported: RuntimeError: broken"
    assert forbidden == "the format plain is custom code, and OPTEXPORT_NO_CUSTOM_CODE forbids custom code"


@pytest.mark.slow
def test_format_of_an_installed_package_works_in_every_command(tmp_path: Path) -> None:
    _install(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"input": [1.0, 2.0, 3.0, 4.0]}\n')

    _optexport(tmp_path, "check", "config.toml")
    assert "model.plain" in _optexport(tmp_path, "run", "config.toml")
    assert json.loads(_optexport(tmp_path, "verify", "bundle", "--json"))["passed"]
    predicted = _optexport(tmp_path, "predict", "bundle", "--format", "plain", "--data", "rows.jsonl", "--json")
    assert json.loads(predicted)["format"] == "plain"
    measured = _optexport(tmp_path, "bench", "bundle", "--rounds", "1", "--seconds", "0.01", "--json")
    assert [artifact["format"] for artifact in json.loads(measured)["artifacts"]] == ["plain"]

    without = CliRunner().invoke(cli, ["verify", str(tmp_path / "bundle")])
    assert without.exit_code == 4
    assert "the format 'plain' is not installed here" in without.output


@pytest.mark.slow
def test_format_of_the_guide_keeps_the_laws(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (code,) = [block for block in blocks if "class LinearFormat" in block]
    (check,) = [block for block in blocks if "check_format(" in block]
    (tmp_path / "linear_format.py").write_text(code)
    _python(tmp_path, "-c", f"import sys; sys.path.insert(0, '.'); from linear_format import LinearFormat\n{check}")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Plain", "is not a valid name of a format"),
        ("../escape", "is not a valid name of a format"),
        ("tf-lite", "is not a valid name of a format"),
        ("", "is not a valid name of a format"),
        ("onnx", "the name onnx is already used"),
        ("xml", "the name xml is already used"),
        ("json", "the name json is already used"),
        ("taken", "the file exists"),
    ],
)
def test_invalid_format_name_is_refused_and_nothing_is_written(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "optexport-taken").mkdir()
    (tmp_path / "optexport-taken" / "pyproject.toml").write_text("mine")
    result = CliRunner().invoke(cli, ["new-format", name, "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert reason in result.output
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["pyproject.toml"]


@pytest.mark.parametrize("command", [["export", "."], ["bench", "."], ["predict", "."]])
def test_unknown_format_of_an_option_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--format", "onx"])
    assert result.exit_code == 2
    assert 'unknown format "onx". Did you mean "onnx"?' in " ".join(result.output.split())
