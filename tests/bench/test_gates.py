"""Tests of ``[bench]`` and ``[gate]`` of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner

from optexport.bench import gates
from optexport.bench.artifact import Artifact
from optexport.bench.report import Figures, PairwiseComparison, Report
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Comparison
from optexport.cli.main import cli
from optexport.config.benchmarks import GateConfig
from optexport.errors import GateError
from optexport.pipeline import run
from tests._helpers import exports, stores
from tests._helpers.cli import Caller, config, message

DYNAMIC = 'tensors.x.shape = ["batch", 4]\ndynamic.batch = [1, 8]'


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def as_onnx(more: str) -> str:
    """Returns a config that exports ONNX, whose worker starts fastest."""
    return config(inputs=DYNAMIC, more=more).replace('formats = ["pt2"]', 'formats = ["onnx"]')


def measured(folder: Path) -> Mapping[str, Any]:
    return dict(json.loads((folder / "build" / "model" / "measurements.json").read_bytes())["bench"])


# Figures


@pytest.mark.slow
def test_run_measures_nothing_by_default(call: Caller, tmp_path: Path) -> None:
    assert "Benchmark" not in call("run", config(inputs=DYNAMIC)).stdout
    assert "bench" not in json.loads((tmp_path / "build" / "model" / "measurements.json").read_bytes())


@pytest.mark.slow
def test_figures_are_printed_and_not_in_the_manifest(call: Caller, tmp_path: Path) -> None:
    bench = "bench = { enabled = true, rounds = 1, shapes = [{ batch = 1 }, { batch = 8 }] }"
    result = call("run", as_onnx(bench))
    assert result.exit_code == 0, result.stderr
    assert "p50 ms" in result.stdout
    rows = measured(tmp_path)["figures"]
    assert [(row["artifact"], row["shape"], row["rows"]) for row in rows] == [
        ("PyTorch", "batch=1", 1),
        ("onnx", "batch=1", 1),
        ("PyTorch", "batch=8", 8),
        ("onnx", "batch=8", 8),
    ]
    assert "p50" not in (tmp_path / "build" / "model" / "manifest.json").read_text()
    manifest = (tmp_path / "build" / "model" / "manifest.json").read_bytes()
    assert CliRunner().invoke(cli, ["verify", str(tmp_path / "build" / "model")]).exit_code == 0
    assert call("run", as_onnx(bench)).exit_code == 0
    assert (tmp_path / "build" / "model" / "manifest.json").read_bytes() == manifest, "equal runs, equal bytes"


@pytest.mark.slow
def test_size_at_which_the_model_fails_leaves_a_note(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "import torch\n\nclass Picky(torch.nn.Module):\n    def forward(self, x):\n"
        "        if not torch.compiler.is_exporting() and x.shape[0] == 7:\n            raise ValueError('seven')\n"
        "        return x * 2\n\ndef load():\n    return Picky()\n",
        encoding="utf-8",
    )
    bench = "parity.effort = 'quick'\nbench = { enabled = true, rounds = 1, shapes = [{ batch = 7 }] }"
    result = call("run", config("picky:load", DYNAMIC, bench).replace('["pt2"]', '["onnx"]'))
    assert result.exit_code == 0, result.stderr
    assert "PyTorch: not measured, because the model fails: ValueError: seven" in measured(tmp_path)["notes"]
    assert [row["artifact"] for row in measured(tmp_path)["figures"]] == ["onnx"]


@pytest.mark.slow
def test_figures_are_metrics_of_the_mlflow_run(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    path = stores.project(tmp_path, "sqlite:///mlflow.db", formats='["onnx"]')
    path.write_text(f"{path.read_text()}[bench]\nenabled = true\nrounds = 1\nshapes = [{{ batch = 3 }}]\n")
    before = mlflow.get_tracking_uri()
    try:
        result = run.run(path)
        metrics = mlflow.MlflowClient(uri).get_run(str(result.run_id)).data.metrics
        table = mlflow.artifacts.load_dict(f"runs:/{result.run_id}/tables/latency.json")
    finally:
        mlflow.set_tracking_uri(before)
    assert result.bench is not None
    original, figures = result.bench.figures
    assert original.artifact.name == "PyTorch"
    assert metrics["latency/onnx_ms"] == pytest.approx(1e3 * figures.p50)
    _, row = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert row["shape"].startswith("batch=3,sequence=")
    assert row["rows_per_second"] == pytest.approx(figures.rows_per_second)


@pytest.mark.slow
def test_unknown_axis_is_an_error(call: Caller) -> None:
    inputs = 'tensors.x.shape = ["batch", 4]'
    bench = "bench = { enabled = true, shapes = [{ bach = 1 }] }"
    error = message(call("run", config(inputs=inputs, more=bench)), 2)
    assert "mine.toml: bench.shapes[0]: no input has a dynamic axis bach" in error


# Gates


@pytest.mark.slow
def test_gates_that_hold_pass_and_imply_a_benchmark(call: Caller, tmp_path: Path) -> None:
    bars = "gate = { max_size_mb = 50, max_latency_ms = { onnx = 60000 }, min_speedup = 0.0001 }\nbench.rounds = 12"
    result = call("run", as_onnx(bars))
    assert result.exit_code == 0, result.stderr
    document = measured(tmp_path)
    pairs = [(compared["artifact"], compared["baseline"]) for compared in document["comparisons"]]
    assert pairs == [("onnx", "plain onnx"), ("onnx", "PyTorch")]
    proven = {"PyTorch": False, "onnx": True, "plain onnx": False}
    assert {a["name"]: a["proven"] for a in document["artifacts"]} == proven


@pytest.mark.parametrize("speedup", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_gates_that_fail_are_named_with_exit_code_6(speedup: bool, call: Caller, tmp_path: Path) -> None:
    bars = "gate = { max_size_mb = 1e-6, max_latency_ms = 1e-9 }\nbench.rounds = 1"
    if speedup:
        bars = bars.replace(" }", ", min_speedup = 1000 }").replace("rounds = 1", "rounds = 12")
    error = message(call("run", as_onnx(bars)), 6)
    assert "max_size_mb: onnx has " in error
    assert "maximum 1e-06" in error
    assert "max_latency_ms: onnx takes " in error
    assert ("min_speedup: onnx has speedup " in error) is speedup
    assert ("minimum 1000 for the lower end" in error) is speedup
    assert not (tmp_path / "build" / "model").exists()


@pytest.mark.slow
def test_gate_on_size_measures_no_times(call: Caller, tmp_path: Path) -> None:
    assert call("run", config(inputs=DYNAMIC, more="gate.max_size_mb = 50")).exit_code == 0
    assert "bench" not in json.loads((tmp_path / "build" / "model" / "measurements.json").read_bytes())
    assert "max_size_mb" in message(call("run", config(inputs=DYNAMIC, more="gate.max_size_mb = { pt2 = 1e-6 }")), 6)


# ONNX cannot hold this model without the rule, so that the plain export fails.
ONLY_WITH_A_RULE = """
import operator
import torch
from torch import nn
from optexport.transformations import Transformation

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + torch.special.bessel_j1(x * 0)

def load():
    torch.manual_seed(0)
    return Model()

class WithoutBessel(Transformation):
    preserves_computation = True

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if "bessel" in str(node.target):
                node.target, node.args = operator.mul, (node.args[0], 1.0)
        return graph_module
"""


def only_with_a_rule(folder: Path, more: str) -> str:
    (folder / "bessel.py").write_text(ONLY_WITH_A_RULE, encoding="utf-8")
    sys.modules.pop("bessel", None)
    text = config("bessel:load", DYNAMIC, f"bench.rounds = 12\n{more}").replace('["pt2"]', '["onnx"]')
    return f'{text}\n[[transformations]]\nuse = "python:bessel:WithoutBessel"\n'


@pytest.mark.nightly
def test_tuned_file_without_plain_export_has_a_note(call: Caller, tmp_path: Path) -> None:
    result = call("run", only_with_a_rule(tmp_path, 'bench.enabled = true\ntune.budget = "1s"'))
    assert result.exit_code == 0, result.stderr
    (note,) = measured(tmp_path)["notes"]
    assert note.startswith("onnx: not compared, because the plain export failed: aten.special_bessel_j1")
    assert [pair["baseline"] for pair in measured(tmp_path)["comparisons"]] == ["PyTorch"]


@pytest.mark.slow
def test_speedup_gate_fails_without_a_plain_export(call: Caller, tmp_path: Path) -> None:
    error = message(call("run", only_with_a_rule(tmp_path, "gate.min_speedup = 0.5")), 6)
    assert "min_speedup: onnx has no baseline, because the plain export failed: aten.special_bessel_j1" in error


ONNX = Artifact("onnx", Path(), "onnx", 2_000_000)
PT2 = Artifact("pt2", Path(), "pt2", 3_000_000)
PLAIN = Artifact("plain onnx", Path(), "onnx", 2_000_000)
AT = Workload({"batch": 1}, 1, Path())


def report_of(low: float = 1.0, p50: float = 0.002) -> Report:
    figures = tuple(Figures(artifact, AT, p50, 1, 1, None, None, 1, 1, None) for artifact in (ONNX, PT2))
    comparisons = (PairwiseComparison(ONNX, PLAIN, AT, Comparison(1.2, low, 1.3, "faster")),)
    return Report(Settings(), figures, comparisons)


@pytest.mark.parametrize(
    ("gate", "report", "failures"),
    [
        ({"max_size_mb": 3}, None, []),
        ({"max_size_mb": 2.9}, None, ["max_size_mb: pt2 has 3 MB,"]),
        ({"max_size_mb": {"every": 1, "pt2": 3}}, None, ["max_size_mb: onnx has 2 MB,"]),
        ({"max_size_mb": {"onnx": 2}}, None, []),
        ({"max_latency_ms": 2}, report_of(), []),
        ({"max_latency_ms": {"pt2": 1.9}}, report_of(), ["max_latency_ms: pt2 takes 2 ms (p50) at batch=1"]),
        ({"max_latency_ms": 2}, Report(Settings(), (), ()), ["onnx was not measured", "pt2 was not measured"]),
        ({"min_speedup": {"onnx": 1}}, report_of(), []),
        ({"min_speedup": {"onnx": 1.1}}, report_of(1.09), ["min_speedup: onnx has speedup 1.2 (1.09 to 1.3)"]),
        ({"min_speedup": {"pt2": 0.5}}, report_of(), ["min_speedup: pt2 was not compared with the plain export"]),
    ],
)
def test_each_gate_checks_its_figure(gate: dict[str, Any], report: Report | None, failures: list[str]) -> None:
    config, proof = GateConfig.model_validate(gate), exports.exported().manifest.parity
    if not failures:
        gates.check(config, [ONNX, PT2], report, proof, {})
        return
    with pytest.raises(GateError) as caught:
        gates.check(config, [ONNX, PT2], report, proof, {})
    assert caught.value.exit_code == 6
    assert caught.value.parity is proof
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(failures)
    assert all(failure in line for failure, line in zip(failures, lines, strict=True))
