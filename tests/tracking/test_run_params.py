"""Tests the params, metrics and figures sent to MLflow, within its limits on names and sizes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Metric

from optexport.tracking import run_params
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.payload import draw_figures
from optexport.tracking.run_metrics import bundle_metrics
from optexport.tracking.sending import send_params
from optexport.tracking.tables import bundle_tables
from tests._helpers import stores
from tests.tracking.bundles import QUIET, bundle, gate_result, timed

pytestmark = QUIET


@pytest.mark.slow
def test_many_settings_are_all_logged(tmp_path: Path) -> None:
    """A config with many inputs exceeds the limit of one request."""

    def change(document: dict[str, Any]) -> None:
        document["config"]["inputs"] = {f"setting_{i}": {"inner": i} for i in range(250)}

    uri = stores.store(tmp_path)
    finished = BundleRecord.read(bundle(tmp_path, manifest=change))
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run("0").info.run_id
    send_params(client, run_id, run_params.params(finished.manifest.config))
    assert sum(key.startswith("inputs.setting") for key in client.get_run(run_id).data.params) == 250


@pytest.mark.slow
def test_names_refused_by_mlflow_are_changed_and_stay_distinct(tmp_path: Path) -> None:
    """Users choose the names of settings and metrics, and one refused name failed the whole run."""
    names = ["a b", "a_b", "a?b", "<b>", "a//b", "../x", "/", ".", "é", "a\nb", "x" * 300, "x" * 301, "\ud800"]

    def change(document: dict[str, Any]) -> None:
        document["parity"]["targets"] = document["parity"]["targets"][:2]
        document["parity"]["targets"][1]["gate_results"] = [gate_result(name) for name in names[:-1]]

    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run("0").info.run_id
    send_params(client, run_id, run_params.params({"model": {"arguments": {name: i for i, name in enumerate(names)}}}))
    metrics = bundle_metrics(BundleRecord.read(bundle(tmp_path, manifest=change)))
    client.log_batch(run_id, metrics=[Metric(name, value, 0, step) for name, value, step in metrics])
    run = client.get_run(run_id)
    assert sorted(map(int, run.data.params.values())) == [*range(len(names))]
    assert run.data.params["model.arguments.a_b"] == "1"
    assert run.data.params["model.arguments.a b"] == "0"
    assert sum(value == 0.75 for value in run.data.metrics.values()) == len(names) - 1
    assert run.data.metrics == {name: value for name, value, _ in metrics}


def test_a_bundle_with_many_gates_and_targets_has_40_metrics(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        original, first, *_ = document["parity"]["targets"]
        first["gate_results"] = [gate_result(f"python:metrics:number_{i}") for i in range(60)]
        more = [{**first, "target": f"graph-{i}"} for i in range(60)]
        document["parity"]["targets"] = [original, first, *more]

    record = BundleRecord.read(bundle(tmp_path, manifest=change, measurements=timed(1.0, 1.5)))
    names = list(dict.fromkeys(name for name, _, _ in bundle_metrics(record)))
    assert len(names) == 40
    assert names[:2] == ["parity/passed", "parity/worst_share_of_tolerance"]
    assert {"latency/onnx_ms", "files/pt2_mb", "graph/nodes", "gates/python_metrics_number_0"} <= {*names}
    tables = bundle_tables(record)
    assert len(json.loads(tables["gates.json"])["data"]) == 61 * 60


def test_a_dollar_in_a_name_is_drawn_as_a_dollar(tmp_path: Path) -> None:
    """Matplotlib reads text between two dollars as math, and invalid math stopped the upload."""

    def change(document: dict[str, Any]) -> None:
        for target in document["parity"]["targets"]:
            target["outputs"][0] |= {"output": "price_$usd^$", "floor_ratio": 1.0}

    def dollars(document: dict[str, Any]) -> None:
        timed(1.0, 1.5)(document)
        document["bench"]["figures"][0]["shape"] = "batch_$usd^$=1"

    figures = draw_figures(BundleRecord.read(bundle(tmp_path, manifest=change, measurements=dollars)))
    assert set(figures) == {"parity.png", "latency.png"}
    for figure in figures.values():
        figure.savefig(io.BytesIO())


def test_a_long_setting_is_shortened_with_an_ellipsis() -> None:
    text = run_params.params({"inputs": {"texts": ["word " * 50] * 40}})["inputs.texts"]
    assert text.endswith("...")
    assert len(text) <= 6000
