"""Lower precision on the terminal, in reports and in verify, with exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from optexport.bundle.manifest import Manifest
from optexport.cli.main import cli
from optexport.config.metrics import round_for_gate
from optexport.quantization import int8
from optexport.report import github, junit
from tests._helpers import exports
from tests.quantization import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("telling")


@pytest.fixture(scope="module")
def summary(folder: Path) -> str:
    """Returns the output of a run, and leaves its bundle in the folder."""
    done = CliRunner().invoke(cli, ["run", str(models.write(folder, 'onnx = "int8"'))])
    assert done.exit_code == 0, done.output
    return done.output


def test_summary_lists_lowered_layers_and_reasons_for_the_rest(summary: str) -> None:
    assert "Precision onnx is int8, checked by gates: cosine of output 0.999" in summary
    assert "3 of 4 layers in int8" in summary
    assert f"in float32: {models.HURT} (measured; lowered alone: cosine of output 0." in summary
    assert "onnx-optimized (int8)" in summary


@pytest.mark.usefixtures("summary")
def test_verify_names_the_gates_of_each_file(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["verify", str(folder / "bundle")])
    assert done.exit_code == 0, done.output
    assert "gates met by onnx (int8), onnx-optimized (int8)" in done.output
    done = CliRunner().invoke(cli, ["verify", str(folder / "bundle"), "--json"])
    rows = json.loads(done.output)["targets"]
    assert {row["limit"] for row in rows} == {None}


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_verify_refuses_a_file_that_misses_its_gates(folder: Path, tmp_path: Path) -> None:
    bundle, prepared = tmp_path / "lowered", tmp_path / "prepared.onnx"
    shutil.copytree(folder / "bundle", bundle)
    plain = CliRunner().invoke(cli, ["run", str(models.write(tmp_path, "", gates=""))])
    assert plain.exit_code == 0, plain.output
    layers = int8.prepare(tmp_path / "bundle" / "model.onnx", prepared, "int8", 7)
    int8.quantize(prepared, bundle / "model.onnx", [n for nodes in layers.values() for n in nodes], "int8", 7, [])
    exports.reseal(bundle, "model.onnx")
    done = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert done.exit_code == 6, done.output
    assert "onnx: output, cosine is" in done.output
    blamed = CliRunner().invoke(cli, ["diagnose", str(bundle)])
    assert blamed.exit_code == 6, blamed.output


@pytest.mark.usefixtures("summary")
def test_diagnose_accepts_a_bundle_within_its_gates(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["diagnose", str(folder / "bundle")])
    assert done.exit_code == 0, done.output
    assert "onnx (int8)" in done.output


@pytest.mark.usefixtures("summary")
def test_reports_name_the_precision_and_omit_absent_limits(folder: Path) -> None:
    manifest = Manifest.model_validate_json((folder / "bundle" / "manifest.json").read_bytes())
    rows = [line for line in github.markdown(manifest.parity, "bundle").splitlines() if "(int8)" in line]
    assert len(rows) == 4
    assert "| gates |" in rows[0]
    suites = ElementTree.fromstring(junit.render(manifest.parity))
    classes = {case.get("classname") for case in suites.iter("testcase")}
    assert {"optexport.onnx (int8)", "optexport.onnx-float32"} <= classes


@pytest.mark.usefixtures("summary")
def test_report_shows_a_value_below_its_gate(folder: Path) -> None:
    """The value was rounded to 1, above the gate."""
    manifest = Manifest.model_validate_json((folder / "bundle" / "manifest.json").read_bytes())
    record = manifest.artifacts[0].precision
    assert record is not None
    (lowered,), (chosen,) = record.lowered, record.chosen
    assert lowered.value is not None
    assert chosen.value is not None
    page = (folder / "bundle" / "report.html").read_text(encoding="utf-8")
    shown = page[page.index("Values of the gates") :]
    assert f'<td class="n">{lowered.value:.6g}</td><td class="n">{chosen.value:.6g}</td>' in shown
    assert f'<td class="n">{chosen.min:.15g}</td>' in shown


@pytest.mark.usefixtures("summary")
def test_diff_shows_gates_in_place_of_tolerances(folder: Path, tmp_path: Path) -> None:
    plain = CliRunner().invoke(cli, ["run", str(models.write(tmp_path, "", gates=""))])
    assert plain.exit_code == 0, plain.output
    arguments = ["diff", str(tmp_path / "bundle"), str(folder / "bundle")]
    sections = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["sections"]
    rows = {row["target"]: row for row in sections["Parity"]["rows"]}
    assert rows["onnx (int8)"] | {"distance in B": 0} == {
        "target": "onnx (int8)", "output": "output", "distance in A": "not there", "limit in A": None,
        "distance in B": 0, "limit in B": "gates",
    }  # fmt: skip
    assert isinstance(rows["onnx"]["limit in A"], float)
    assert rows["onnx"]["limit in B"] is None
    gates = {row["target"]: row for row in sections["Gates"]["rows"]}
    manifest = Manifest.model_validate_json((folder / "bundle" / "manifest.json").read_bytes())
    (target,) = [target for target in manifest.parity.targets if target.title == "onnx (int8)"]
    (result,) = target.gate_results
    assert gates["onnx (int8)"] == {
        "target": "onnx (int8)", "metric": "cosine of output", "value in A": "not there", "value in B": result.value,
        "minimum": result.min,
    }  # fmt: skip
    page = tmp_path / "diff.html"
    text = CliRunner(env={"COLUMNS": "200"}).invoke(cli, [*arguments, "--html", str(page)]).stdout
    shown = text[text.index("\nGates\n") :]
    assert f"{result.value:.6g}" in shown
    assert f'<td class="n">{result.value:.6g}</td>' in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("summary")
def test_diff_shows_equal_gates_and_both_minima(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder / "bundle", tmp_path / "other"))

    def change(manifest: dict[str, Any]) -> None:
        for target in manifest["parity"]["targets"]:
            if target["target"] == "onnx":
                target["gate_results"][0]["min"] = 0.5

    exports.edit_json(other / "manifest.json", change)
    done = CliRunner().invoke(cli, ["diff", str(folder / "bundle"), str(other), "--json"])
    rows = {row["target"]: row for row in json.loads(done.stdout)["sections"]["Gates"]["rows"]}
    assert rows["onnx (int8)"]["value in A"] == rows["onnx (int8)"]["value in B"]
    assert rows["onnx (int8)"]["minimum"] == "0.999 in A, 0.5 in B"
    assert rows["onnx-optimized (int8)"]["minimum"] == 0.999


@given(value=st.floats(-1, 1), minimum=st.floats(-1, 1), digits=st.integers(1, 9))
def test_value_is_not_rounded_across_its_gate(value: float, minimum: float, digits: int) -> None:
    for near in (value, minimum, np.nextafter(minimum, -2), np.nextafter(minimum, 2)):
        assert (float(round_for_gate(float(near), minimum, digits)) >= minimum) == (near >= minimum)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "gates", "code"),
    [('onnx = "int8"', "", 2), ('onnx = "int8"', "cosine = 0.99999999", 4), ('onnx = "int8"', "cosine = 0.9", 0)],
)
def test_exit_code_names_the_kind_of_failure(tmp_path: Path, precision: str, gates: str, code: int) -> None:
    done = CliRunner().invoke(cli, ["run", str(models.write(tmp_path, precision, gates=gates)), "--json"])
    assert done.exit_code == code, done.output
    document = json.loads(done.stdout)
    assert document["passed"] == (code == 0)
    if code == 4:
        assert [target["target"] for target in document["parity"]["targets"]][-1] == "onnx-float32-optimized"


@pytest.mark.slow
def test_baseline_is_in_float32(tmp_path: Path) -> None:
    config = models.write(tmp_path, 'onnx = "int8"', model="harmless")
    done = CliRunner().invoke(cli, ["run", str(config), "--baseline"])
    assert done.exit_code == 0, done.output
    manifest = Manifest.model_validate_json((tmp_path / "bundle-baseline" / "manifest.json").read_bytes())
    assert [artifact.precision for artifact in manifest.artifacts] == [None]
    assert {target.precision for target in manifest.parity.targets} == {None}


@pytest.mark.slow
def test_output_without_a_gate_is_named(tmp_path: Path) -> None:
    config = models.write(tmp_path, 'onnx = "int8"', model="convolved", gates="cosine = 0.9")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["run", str(config)])
    assert done.exit_code == 0, done.output
    assert "no gate and no tolerance: output_1\n" in done.output
    manifest = Manifest.model_validate_json((tmp_path / "bundle" / "manifest.json").read_bytes())
    rows = [line for line in github.markdown(manifest.parity, "bundle").splitlines() if "| onnx (int8) |" in line]
    assert ["| gates |" in row for row in rows[:2]] == [True, False]
    assert "| none |" in rows[1]


@pytest.mark.slow
def test_verify_says_that_a_custom_gate_is_not_checked_again(tmp_path: Path) -> None:
    gates = '"python:tests.quantization.models:metric" = 0.5'
    done = CliRunner().invoke(cli, ["run", str(models.write(tmp_path, 'onnx = "int8"', gates=gates))])
    assert done.exit_code == 0, done.output
    assert "no gate and no tolerance" not in done.output
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "bundle")])
    assert done.exit_code == 0, done.output
    assert "gates met by" not in done.output
    assert "no gate to check for onnx (int8), onnx-optimized (int8)" in done.output
    assert "not checked again: python:tests.quantization.models:metric)" in done.output
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "bundle"), "--json"])
    assert json.loads(done.output)["gates_not_checked"] == ["python:tests.quantization.models:metric"]


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_verify_refuses_an_unproven_file_called_lowered(folder: Path, tmp_path: Path) -> None:
    plain = CliRunner().invoke(cli, ["run", str(models.write(tmp_path, "", gates=""))])
    assert plain.exit_code == 0, plain.output
    lowered = json.loads((folder / "bundle" / "manifest.json").read_bytes())["artifacts"][0]["precision"]
    bundle = tmp_path / "bundle"
    shutil.copy(folder / "bundle" / "model.onnx", bundle / "model.onnx")
    exports.edit_json(bundle / "manifest.json", lambda document: document["artifacts"][0].update(precision=lowered))
    exports.reseal(bundle, "model.onnx")
    done = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert done.exit_code == 4, done.output
    assert "the parity record does not show that onnx was checked in int8" in done.output


POSITIONS = """
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        n = x.shape[1]
        counted = torch.ones(n, n).tril() @ torch.ones(n, 1)  # in bfloat16 no whole number above 256 but each second
        return self.layer(x) + 3 * torch.sin(counted * 1.3)
"""
COUNTED = """
[model]
source = "python:positions:Positions"
[inputs]
data = "data.npz"
[inputs.axes]
x = ["batch", "n", "f"]
[inputs.dynamic]
batch = [1, 8]
n = [2, 2000]
[export]
output = "bundle"
formats = ["pt2"]
[precision]
pt2 = "bfloat16"
[parity.metrics]
cosine = 0.99
[tracking]
enabled = false
"""


@pytest.mark.slow
def test_gross_error_beyond_the_data_fails_despite_passed_gates(tmp_path: Path) -> None:
    """The gates saw 16 rows of four. Files with noise at every length above some hundreds passed."""
    (tmp_path / "positions.py").write_text(POSITIONS, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(COUNTED, encoding="utf-8")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((4, 4, 8), dtype=np.float32))
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "mine.toml")])
    assert done.exit_code == 4, done.output
    assert "n 2000: " in done.stderr
    assert "the difference has a norm of" in done.stderr
    (tmp_path / "mine.toml").write_text(COUNTED.replace("2000", "200"), encoding="utf-8")
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "mine.toml")])
    assert done.exit_code == 0, done.output
    assert "gates use your data only; at other sizes only gross errors are detected" in done.stdout
    report = (tmp_path / "bundle" / "report.html").read_text(encoding="utf-8")
    assert "use your data only; at other sizes only gross errors are detected." in report


@pytest.mark.slow
def test_output_near_zero_at_one_size_is_not_a_gross_error(tmp_path: Path) -> None:
    """With one row, the distances between rows are only rounding."""
    model = """
import torch
from torch import nn

class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        z = nn.functional.normalize(self.layer(x), dim=-1)
        return 1 - z @ z.T
"""
    (tmp_path / "positions.py").write_text(model.replace("Distances", "Positions"), encoding="utf-8")
    text = COUNTED.replace('["batch", "n", "f"]', '["batch", "f"]').replace("n = [2, 2000]\n", "")
    (tmp_path / "mine.toml").write_text(text.replace("0.99", "0.9"), encoding="utf-8")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((8, 8), dtype=np.float32))
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "mine.toml")])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_padding_is_no_gross_error(tmp_path: Path) -> None:
    """Results at padding are not used. In bfloat16, the model's have no correct digit there."""
    model = """
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x, attention_mask):
        far = 3000.0 * (attention_mask[..., None] == 0)
        return self.layer(x + far) - self.layer(far.expand_as(x))
"""
    (tmp_path / "positions.py").write_text(model, encoding="utf-8")
    text = COUNTED.replace("n = [2, 2000]", "n = [2, 20]").replace(
        '"f"]\n', '"f"]\nattention_mask = ["batch", "n"]\n', 1
    )
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    x = np.random.default_rng(0).standard_normal((4, 4, 8), dtype=np.float32)
    np.savez(tmp_path / "data.npz", x=x, attention_mask=np.array([[1, 1, 1, 0]] * 4))
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "mine.toml")])
    assert done.exit_code == 0, done.output
