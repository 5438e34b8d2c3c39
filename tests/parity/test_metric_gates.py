"""Tests gates from a config: mistakes, runs, bundles and the Python API."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from click.testing import CliRunner, Result

from optexport import export
from optexport.cli.main import cli
from optexport.errors import ConfigError
from optexport.parity.verify import verify
from optexport.pipeline import run as pipeline_run
from tests._helpers import exports
from tests._helpers.config_errors import table

D = "parity.metrics"
MISTAKES = {
    "unknown measure": (
        table(D, "argmax_agrement = 1.0"),
        D,
        'unknown metric "argmax_agrement"\nHint: Did you mean "argmax_ag',
    ),
    "unknown far from any": (table(D, "zzz = 1.0"), D, "Choose one of: argmax_agreement, top_k_agreement, cosine, iou"),
    "unknown key": (table(D, "cosine = { min = 1.0, outptu = 'y' }"), f"{D}.cosine.outptu", 'Did you mean "output"?'),
    "no least value": (table(D, "cosine = { output = 'y' }"), f"{D}.cosine.min", "required key is missing"),
    "text": (table(D, "cosine = 'high'"), f"{D}.cosine", "expected a table"),
    "flag": (table(D, "cosine = true"), f"{D}.cosine.min", "found true"),
    "nan": (table(D, "cosine = nan"), f"{D}.cosine.min", "finite"),
    "percent": (table(D, "iou = 99.0"), D, "expected a min of iou between 0 and 1, found 99"),
    "below all": (table(D, "cosine = -2"), D, "expected a min of cosine between -1 and 1, found -2"),
    "k of none": (table(D, "top_k_agreement = { min = 1.0, k = 0 }"), f"{D}.top_k_agreement.k", "found 0"),
    "k of cosine": (
        table(D, "cosine = { min = 1.0, k = 5 }"),
        D,
        'cosine has no option "k"\nHint: Choose one of: min, output.',
    ),
    "output of a metric": (table(D, '"python:a:b" = { min = 1, output = "y" }'), D, 'has no option "output"'),
    "metric of no form": (table(D, '"python:f1" = 1.0'), D, 'not of the form "python:module:function"'),
    "metric of nowhere": (
        table(D, '"python:no_such:f1" = 1.0'),
        f"{D}.python:no_such:f1",
        "the module no_such does not exist",
    ),
    "nothing": (table(D), D, "the table is empty"),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_config_mistake_names_its_key_and_the_nearest_name(name: str, tmp_path: Path) -> None:
    text, target, words = MISTAKES[name]
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "mine.toml")])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {tmp_path / 'mine.toml'}: {target}: ")
    assert words in result.stderr


# Full runs. The rule replaces an activation within the fixed tolerance, so only gates can fail.

MODULE = """
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return {"logits": self.down(self.act(3 * self.up(x)))}


def load():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier().eval()
"""
ROWS = 400
METRICS = """
def agreement(candidate, original):
    assert set(candidate) == {"logits"}
    return (candidate["logits"].argmax(-1) == original["logits"].argmax(-1)).double().mean()


def raises(candidate, original):
    if not (candidate["logits"] == original["logits"]).all():
        raise LookupError("no label")
    return 1.0


def low(candidate, original):
    return 0.25


number = 3
"""
CONFIG = """
[model]
source = "python:decisions_model:load"
[inputs]
data = "x.npz"
dynamic.batch = [1, 512]
[export]
formats = ["torchscript", "onnx"]
output = "bundle"
[tracking]
enabled = false
[[transformations]]
use = "replace-activation"
old = "silu"
new = "hardswish"
[parity]
atol = 1.0
[parity.metrics]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("decisions_model", MODULE), ("my_metrics", METRICS)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)  # imported by another test
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((ROWS, 8), np.float32))
    return tmp_path


def call(folder: Path, *gates: str, text: str = CONFIG) -> Result:
    (folder / "mine.toml").write_text("\n".join([text, *gates]), encoding="utf-8")
    return CliRunner().invoke(cli, ["run", str(folder / "mine.toml")])


@pytest.mark.slow
def test_a_gate_can_fail_outputs_within_the_tolerance(folder: Path) -> None:
    text = CONFIG.replace('"torchscript", ', "")
    passed = call(folder, "argmax_agreement = 0.5", "cosine = { min = 0.5, output = 'logits' }", text=text)
    assert passed.exit_code == 0, passed.stderr
    assert re.search(r"onnx-optimized +logits, argmax_agreement +0\.\d+ +0\.5 ", passed.stdout)
    shutil.rmtree(folder / "bundle")
    failed = call(folder, "argmax_agreement = 0.999")
    assert failed.exit_code == 6
    stderr = failed.stderr.partition("FAILED  ")[2]
    assert stderr.startswith("graph: logits, argmax_agreement is ")
    assert re.search(r"is 0\.\d+ \(\d+ of 400 positions agree, 95 % interval .* to .*\); the gate is 0\.999\n", stderr)
    assert "The rule replace-activation caused the difference. It changed " in stderr
    assert "Traceback" not in failed.stderr
    assert not (folder / "bundle").exists()


@pytest.mark.slow
def test_an_exact_transformation_passes_the_strictest_gates(folder: Path) -> None:
    text = CONFIG.replace(
        'use = "replace-activation"\nold = "silu"\nnew = "hardswish"', 'use = "merge-linears"'
    ).replace("atol = 1.0", "")
    gates = ("argmax_agreement = 1.0", "top_k_agreement = { min = 1.0, k = 2 }", '"python:my_metrics:agreement" = 1.0')
    result = call(folder, *gates, text=text)
    assert result.exit_code == 0, result.stderr
    manifest = json.loads((folder / "bundle" / "manifest.json").read_bytes())
    targets = ["original", "graph", "torchscript", "onnx", "onnx-optimized"]
    assert [target["target"] for target in manifest["parity"]["targets"]] == targets
    for target in manifest["parity"]["targets"]:
        assert [(d["measure"], d["output"], d["value"]) for d in target["gate_results"]] == [
            ("argmax_agreement", "logits", 1.0),
            ("top_k_agreement", "logits", 1.0),
            ("python:my_metrics:agreement", None, 1.0),
        ]
        assert target["gate_results"][0]["count"] == sum(case["count"] for case in target["gate_results"][0]["cases"])
        assert [d["count"] for d in target["gate_results"]] == [ROWS, ROWS, 13]
    assert manifest["config"]["parity"]["metrics"]["top_k_agreement"] == {"min": 1.0, "k": 2}


@pytest.mark.slow
def test_a_parity_failure_overrides_the_exit_code_of_a_gate(folder: Path) -> None:
    result = call(folder, "argmax_agreement = 1.0", text=CONFIG.replace("atol = 1.0", "atol = 1e-6"))
    assert result.exit_code == 4
    assert re.search(r"logits is off by .*, tolerance 1\.0e-06 ", result.stderr)
    assert "; the gate is 1\n" in result.stderr


@pytest.mark.slow
def test_a_user_metric_is_a_gate(folder: Path) -> None:
    assert call(folder, '"python:my_metrics:agreement" = 0.5').exit_code == 0
    failed = call(folder, '"python:my_metrics:agreement" = 0.999')
    assert failed.exit_code == 6
    assert re.search(r"graph: python:my_metrics:agreement is 0\.\d+ \(the mean of 13 batches", failed.stderr)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("gate", "code", "words"),
    [
        (
            '"python:my_metrics:raises" = 0.5',
            6,
            "my_metrics:raises, at traced: the metric raised LookupError: no label",
        ),
        ('"python:my_metrics:low" = 0.5', 2, "my_metrics:low: the original model does not pass the gate"),
        ('"python:my_metrics:agrement" = 0.5', 2, 'my_metrics has no agrement\nHint: Did you mean "agreement"?'),
        ('"python:my_metrics:number" = 0.5', 2, "number: the metric is not a function (found int)"),
        ("cosine = { min = 0.5, output = 'logit' }", 2, 'unknown output "logit"\nHint: Did you mean "logits"?'),
    ],
    ids=["raises", "low", "unknown", "no function", "unknown output"],
)
def test_an_unmeasurable_gate_is_one_clear_message(folder: Path, gate: str, code: int, words: str) -> None:
    result = call(folder, gate)
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_gates_are_tracked_as_metrics(folder: Path) -> None:
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    text = CONFIG.replace("enabled = false", f'uri = "{uri}"').replace('["torchscript", "onnx"]', '["torchscript"]')
    (folder / "mine.toml").write_text(
        f"{text}\nargmax_agreement = 0.5\n'python:my_metrics:agreement' = 0.5\n", encoding="utf-8"
    )
    result = pipeline_run.run(folder / "mine.toml")
    assert result.tracking_failure is None
    assert result.run_id is not None
    run = mlflow.MlflowClient(uri).get_run(result.run_id)
    metrics = run.data.metrics
    table = mlflow.artifacts.load_dict(f"runs:/{result.run_id}/tables/gates.json")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    (row,) = [row for row in rows if (row["target"], row["measure"]) == ("torchscript", "argmax_agreement")]
    assert row["low"] < row["value"] < row["high"]
    assert (row["output"], row["count"], row["min"]) == ("logits", ROWS, 0.5)
    assert metrics["gates/argmax_agreement.logits"] <= row["value"]
    assert 0.5 <= metrics["gates/python_my_metrics_agreement"] <= 1.0
    assert run.data.params["parity.metrics.argmax_agreement.min"] == "0.5"


# The bundle


@pytest.fixture
def bundle(folder: Path) -> Path:
    assert call(folder, "argmax_agreement = 0.5", '"python:my_metrics:agreement" = 0.5').exit_code == 0
    return folder / "bundle"


def change_gate(bundle: Path, **values: Any) -> None:
    exports.edit_json(bundle / "manifest.json", lambda d: d["parity"]["gates"][0].update(values))


@pytest.mark.slow
def test_verify_checks_all_gates_except_user_metrics(bundle: Path) -> None:
    targets = verify(bundle).targets[1:]
    assert all(target.passed for target in targets)
    assert [[d.gate.name for d in target.gate_results] for target in targets] == [["logits, argmax_agreement"]] * 3


@pytest.mark.slow
def test_stored_cases_need_not_exceed_their_recorded_value(bundle: Path) -> None:
    recorded = json.loads((bundle / "manifest.json").read_bytes())["parity"]["targets"][2]["gate_results"][0]
    change_gate(bundle, min=recorded["value"] + 0.01)
    assert all(target.passed for target in verify(bundle).targets[1:]), "as where the other cases had made up for them"


@pytest.mark.slow
def test_a_bundle_failing_a_gate_exits_with_the_gate_code(bundle: Path) -> None:
    def pretend(document: dict[str, Any]) -> None:
        document["parity"]["gates"][0]["min"] = 1.0
        for target in document["parity"]["targets"]:
            for case in target["gate_results"][0]["cases"]:
                case["total"] = case["count"]

    exports.edit_json(bundle / "manifest.json", pretend)
    result = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert result.exit_code == 6
    assert "onnx: logits, argmax_agreement is 0." in result.stderr
    assert "; the gate is 1\n" in result.stderr


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("wrong", [{"measure": "magic"}, {"output": "other"}, {"output": None}])
def test_a_gate_on_an_unknown_measure_is_a_damaged_bundle(bundle: Path, wrong: dict[str, Any]) -> None:
    change_gate(bundle, **wrong)
    result = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert result.exit_code == 4
    assert "a gate of the manifest has an unknown metric or an unknown output" in result.stderr


# From Python


@pytest.mark.slow
def test_gates_can_be_set_from_python(tmp_path: Path) -> None:
    gates = {"dynamic": exports.DYNAMIC, "formats": ["pt2"], "transformations": []}
    demanded = {"cosine": {"min": 0.9999, "output": "hidden"}, "argmax_agreement": 1}
    result = export(exports.block(), exports.batch(), tmp_path / "block", metrics=demanded, **gates)
    assert [d.gate.measure for d in result.parity[-1].gate_results] == ["cosine", "argmax_agreement"]
    assert all(d.value == pytest.approx(1.0) for d in result.parity[-1].gate_results)
    with pytest.raises(ConfigError, match='unknown metric "cosin"\nHint: Did you mean "cosine"'):
        export(exports.block(), exports.batch(), tmp_path / "other", metrics={"cosin": 1.0}, **gates)
