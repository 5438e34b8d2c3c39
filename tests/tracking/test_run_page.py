"""Tests what a reader sees first on a run's page: description, metrics and failed checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from optexport.errors import GateError, ParityError
from optexport.pipeline import run as pipeline_run
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.description import describe_bundle, describe_failure
from optexport.tracking.run_metrics import bundle_metrics
from optexport.tracking.tables import bundle_tables
from tests._helpers import exports, stores
from tests.tracking.bundles import QUIET, bundle, gate_result, only_run, timed

pytestmark = QUIET

FORMATS = ("onnx", "torchscript", "pt2")
WRONG_RULE = '[[transformations]]\nuse = "python:tests.diagnosis.failures:Relu"'
MEASURED_WITH_GATES = """
[bench]
enabled = true
rounds = 1
shapes = [{ batch = 1 }, { batch = 4 }]
[gate]
max_size_mb = 5
max_latency_ms = { onnx = 60000 }
[parity.metrics]
cosine = 0.5
argmax_agreement = 0.5
top_k_agreement = { min = 0.5, k = 2 }
"""


def description(**documents: Any) -> str:
    def change(document: dict[str, Any]) -> None:
        document["config"]["gate"] = {"max_size_mb": {"every": 5.0}, "max_latency_ms": {"onnx": 20.0}}

    folder = documents.pop("folder")
    record = BundleRecord.read(
        bundle(folder, manifest=documents.get("manifest", change), measurements=measured_at_three_shapes)
    )
    return describe_bundle(record, ["report.html", "bundle", "tables"])


def test_the_description_has_verdict_files_gates_and_artifacts(tmp_path: Path) -> None:
    text = description(folder=tmp_path)
    assert re.fullmatch(r"\*\*PASSED\*\* 3 files, \d+ cases, at most \d+ % of the tolerance used", text.splitlines()[0])
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    files = {row[0]: row for row in rows if row[0].startswith("model.")}
    assert set(files) == {"model.onnx", "model.pt2", "model.torchscript.pt"}
    assert files["model.onnx"][2].endswith(" kB")
    assert [row[3] for row in files.values()].count("1.50 (1.20 to 1.60) times as fast (1 ms per call)") == 2
    assert "The speed is that at batch=4; 1 thread." in text.splitlines()
    assert files["model.pt2"][3] == "not measured"
    onnx_mb = (exports.exported().output / "model.onnx").stat().st_size / 1e6
    assert ["max_size_mb", "onnx", f"{onnx_mb:.4g}", "at most 5"] in rows
    assert ["max_latency_ms", "onnx", "1.25", "at most 20"] in rows
    assert "- `report.html`: the report" in text
    assert "config.toml" not in text


def test_a_failure_is_shown_as_it_is() -> None:
    text = describe_failure("FAILED  onnx: *hidden* <b>is off</b>\n  ```", "FAILED")
    assert text == "**FAILED**\n\n    FAILED  onnx: *hidden* <b>is off</b>\n      ```"
    assert describe_failure("interrupted", "KILLED").startswith("**INTERRUPTED**")


def test_a_long_description_fits_into_a_tag(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["parity"]["targets"][1]["gate_results"] = [gate_result(f"{i}{'x' * 300}") for i in range(40)]

    text = description(folder=tmp_path, manifest=change)
    assert len(text) <= 5000
    assert "25 more gates are in `tables/gates.json`" in text
    assert text.endswith("- `tables`: all numbers")
    assert len(describe_failure("x" * 9000, "FAILED", {"tables": "numbers"})) <= 5000


def measured_at_three_shapes(document: dict[str, Any]) -> None:
    """Records benchmarks, gain and tuning of three files."""
    comparison = {"speedup": 1.2, "low": 1.1, "high": 1.3, "verdict": "faster"}
    trial = {"change": "as configured", "rules": [], "passes": [], "refused": None, "comparison": None}
    figures, comparisons = [], []
    for name in FORMATS:
        for shape in ("batch=1", "batch=4", "batch=16"):
            timed(1.0, 1.5)(document)
            (row,) = document["bench"]["figures"]
            figures.append({**row, "artifact": name, "format": name, "shape": shape})
            comparisons.append({"artifact": name, "baseline": f"plain {name}", "shape": shape, **comparison})
    artifacts = [{"name": name, "format": name, "bytes": 1000, "proven": True} for name in FORMATS]
    document["bench"] |= {"artifacts": artifacts, "figures": figures, "comparisons": comparisons}
    gain = {"ms": 1.0, "original_ms": 1.5, "speedup": 1.5, "low": 1.2, "high": 1.6, "sizes": "batch=4", "threads": 1}
    document["gain"] = [{"format": name, **gain} for name in ("onnx", "torchscript")]
    document.pop("gain_skipped", None)
    steps = [f"{step} {name}" for name in FORMATS for step in ("tune", "export", "check")]
    document["seconds"] |= dict.fromkeys([*steps, "measure"], 1.0)
    document["tune"] = [
        {"format": name, "chosen": trial, "measure": "as configured", "over_plain": comparison, "trials": [trial]}
        for name in FORMATS
    ]


def three_variants_with_gates(document: dict[str, Any]) -> None:
    targets = document["parity"]["targets"]
    for target in targets:
        target["gate_results"] = [gate_result(name) for name in ("cosine", "argmax_agreement", "top_k_agreement")]
    graph = next(target for target in targets if target["target"] == "graph")
    targets += [{**graph, "target": f"graph-{name}"} for name in ("torchscript", "pt2")]


def test_the_description_says_why_there_are_no_times(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["gain_skipped"] = "the model runs on a GPU"

    text = describe_bundle(BundleRecord.read(bundle(tmp_path, measurements=change)), [])
    assert "The speed was not measured: the model runs on a GPU." in text.splitlines()


def test_a_tuned_and_measured_bundle_with_gates_has_at_most_40_metrics(tmp_path: Path) -> None:
    target = bundle(tmp_path, manifest=three_variants_with_gates, measurements=measured_at_three_shapes)
    record = BundleRecord.read(target)
    metrics = {name: value for name, value, _ in bundle_metrics(record)}
    groups = {name.partition("/")[0] for name in metrics}
    assert groups == {"parity", "files", "gain", "latency", "graph", "time", "gates"}
    assert len(metrics) <= 40
    for target_record in record.manifest.parity.compared:  # none of them is left out
        assert f"parity/{target_record.target}_share_of_tolerance" in metrics
    assert metrics["gain/pt2_over_plain_export"] == 1.2
    assert metrics["gain/onnx"] == 1.5
    assert metrics["time/tune_seconds"] == 3.0
    tables = {name: json.loads(content) for name, content in bundle_tables(record).items()}
    assert len(tables["latency.json"]["data"]) == len(tables["speedups.json"]["data"]) == 9
    assert tables["tuning.json"]["data"][0] == ["onnx", "as configured", 1.2, 1.1, 1.3, "faster"]


@pytest.mark.nightly
def test_a_measured_run_with_gates_is_described(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri, formats='["onnx", "torchscript", "pt2"]')
    config.write_text(config.read_text() + MEASURED_WITH_GATES)
    result = pipeline_run.run(config)
    assert result.tracking_failure is None
    run = only_run(uri)
    assert 20 <= len(run.data.metrics) <= 40
    assert run.data.metrics["parity/passed"] == 1.0
    assert run.data.metrics["gates/cosine.hidden"] == pytest.approx(1.0)
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**PASSED**")
    assert note.count(" times as fast (") == len(result.gain)  # none on a machine that is too busy
    for gate in ("cosine of hidden", "top_k_agreement of hidden", "max_size_mb", "max_latency_ms"):
        assert f"| {gate} |" in note
    tables = {file.path for file in mlflow.MlflowClient(uri).list_artifacts(run.info.run_id, "tables")}
    names = {"parity", "gates", "files", "transformations", "seconds", "latency"}
    assert tables >= {f"tables/{name}.json" for name in names}
    assert {entry["path"] for entry in json.loads(run.data.tags["mlflow.loggedArtifacts"])} == tables


@pytest.mark.slow
def test_a_failed_check_uploads_its_folder_and_tables(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    with pytest.raises(ParityError) as caught:
        pipeline_run.run(stores.project(tmp_path, uri, rules=WRONG_RULE, formats='["pt2"]'))
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert run.data.metrics["parity/passed"] == 0.0
    assert run.data.metrics["parity/worst_share_of_tolerance"] > 1
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**FAILED**\n\n    graph: hidden is off by ")
    assert "- `bundle-failure/reproduce.py`: a script that reproduces the failure" in note
    client = mlflow.MlflowClient(uri)
    folder = Path(client.download_artifacts(run.info.run_id, "bundle-failure", str(tmp_path)))
    local = tmp_path / "out" / "block-failure"
    assert caught.value.folder == local
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in local.iterdir()}
    reproduced = subprocess.run([sys.executable, str(folder / "reproduce.py")], capture_output=True, check=False)
    assert reproduced.returncode == 1
    table = client.load_table(run.info.experiment_id, "tables/parity.json", [run.info.run_id])
    failed = table[table["failure"].notna()]
    assert {"graph"} == set(failed["target"])
    assert (failed["share_of_tolerance"] > 1).all()


@pytest.mark.slow
def test_a_missed_gate_is_described_without_a_folder(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri, formats='["pt2"]')
    config.write_text(f"{config.read_text()}[gate]\nmax_size_mb = 0.0001\n")
    with pytest.raises(GateError):
        pipeline_run.run(config)
    run = only_run(uri)
    assert (run.info.status, run.data.metrics["parity/passed"]) == ("FAILED", 1.0)
    assert "max_size_mb: pt2 has " in run.data.tags["mlflow.note.content"]
    listed = {file.path for file in mlflow.MlflowClient(uri).list_artifacts(run.info.run_id)}
    assert listed == {"tables"}


@pytest.mark.slow
def test_a_failed_upload_of_the_folder_is_a_line_of_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = stores.store(tmp_path)
    (tmp_path / "mlartifacts").write_text("a file where a folder should be")
    with pytest.raises(ParityError, match="The MLflow run lacks files of this failure: .*mlartifacts") as caught:
        pipeline_run.run(stores.project(tmp_path, uri, rules=WRONG_RULE, formats='["pt2"]'))
    assert caught.value.exit_code == 4
    assert only_run(uri).info.status == "FAILED"
