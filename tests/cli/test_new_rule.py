"""``optexport new-rule``, the guide to writing rules, and rules from installed packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from optexport import symbolic_trace
from optexport._utils import imports
from optexport.cli.main import cli
from optexport.cli.new_rule import write_rule
from optexport.config.load import load_config
from optexport.errors import ConfigError
from optexport.loading.loader import Loaded
from optexport.testing import check_applied, check_refused

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "write-rules.md").read_text(encoding="utf-8")


class Minus(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.number) * 2


@pytest.mark.slow
def test_reversible_rule_of_the_guide_is_valid() -> None:
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "AddTheNegative" in code]
    assert len(code.partition("@dataclass")[2].splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(code, names)
    x = torch.tensor([-0.0, 0.0, 0.1, -3.0, 1e30, torch.inf])
    for number in (3, 0.1, -2.5, 1e-30):
        graph_module = symbolic_trace(Minus(number), example_inputs={"x": x})
        report = check_applied(names["AddTheNegative"](), graph_module, x, exact=True)
        assert report.changes[0].target == "operator.add"
    check_refused(names["AddTheNegative"](), symbolic_trace(Minus(0), example_inputs={"x": x}), x)


def test_exports_of_a_new_rule_have_equal_weights(tmp_path: Path) -> None:
    write_rule("drop-negations", tmp_path)
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = imports.import_from("test_drop_negations:Model", tmp_path, "here")()
        digests.add(Loaded(model.eval()).weights_sha256)
    assert len(digests) == 1


@pytest.mark.nightly
def test_failing_rule_test_shows_its_message_without_trace_logs(tmp_path: Path) -> None:
    write_rule("drop-negations", tmp_path)
    rule = tmp_path / "drop_negations.py"
    right = "outer.replace_all_uses_with(inner.args[0])"
    rule.write_text(rule.read_text().replace(right, "outer.replace_all_uses_with(inner)"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_drop_negations.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"AssertionError: outputs must agree: output 0 differs by \d", done.stdout)
    assert "torch.__trace" not in done.stdout


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Drop Tanh", "is not a valid name of a rule"),
        ("../escape", "is not a valid name of a rule"),
        ("class", "class is a Python keyword"),
        ("", "is not a valid name of a rule"),
        ("x" * 260, "is not a valid name of a rule"),  # too long for a file name; this was reported as a defect
        ("merge-linears", "a built-in rule has the name merge-linears"),
        ("taken", "the file exists"),
        ("random", "a Python module has the name random"),
        ("torch", "a Python module has the name torch"),
        ("conftest", "a Python module has the name conftest"),
        ("match", "the files of a rule use the name Match"),
        ("model", "the files of a rule use the name Model"),
    ],
)
def test_invalid_rule_name_is_refused_and_nothing_is_written(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "test_taken.py").write_text("mine")
    result = CliRunner().invoke(cli, ["new-rule", name, "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert reason in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["test_taken.py"]


def _install(folder: Path, entry: str) -> None:
    """Writes the files that pip installs for a package with a rule."""
    write_rule("drop-negations", folder)
    package = folder / "rules_of_ours-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: rules-of-ours\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[optexport.transformations]\n{entry}\n")


def _listed(folder: Path, *arguments: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); from optexport.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_rule_of_an_installed_package_is_found_by_name(tmp_path: Path) -> None:
    _install(tmp_path, "drop-negations = drop_negations:DropNegations")
    assert re.search(
        r"\ndrop-negations +plugin \(drop_negations:DropNegations\)\n", _listed(tmp_path, "transformations")
    )
    config = tmp_path / "drop_negations.toml"
    config.write_text(config.read_text().replace("python:drop_negations:DropNegations", "drop-negations"))
    summary = _listed(tmp_path, "run", str(config))
    assert "  drop-negations\n    1 neg -> 0, first at " in summary


@pytest.mark.slow
def test_package_does_not_replace_a_built_in_rule(tmp_path: Path) -> None:
    _install(tmp_path, "merge-linears = drop_negations:DropNegations")
    assert "plugin" not in _listed(tmp_path, "transformations")


def test_rule_without_a_package_is_refused(tmp_path: Path) -> None:
    write_rule("drop-negations", tmp_path)
    config = tmp_path / "drop_negations.toml"
    config.write_text(config.read_text().replace("python:drop_negations:DropNegations", "drop-negations"))
    with pytest.raises(ConfigError, match='unknown rule "drop-negations"'):
        load_config(config)
