"""Tests the params, metrics and figures sent to MLflow, within its limits on names and sizes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Metric

from optexport.tracking import run_params
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.payload import draw_figures
from optexport.tracking.upload import send_params
from tests._helpers import stores
from tests.tracking.bundles import QUIET, bundle, timed

pytestmark = QUIET


@pytest.mark.slow
def test_many_settings_and_many_metrics_are_all_logged(tmp_path: Path) -> None:
    """A config with many inputs or a model with many outputs exceeds the limit of one request."""

    def change(document: dict[str, Any]) -> None:
        document["config"]["inputs"] = {f"setting_{i}": {"inner": i} for i in range(250)}
        target = document["parity"]["targets"][0]
        target["outputs"] = [{**target["outputs"][0], "output": f"layer.{i}"} for i in range(400)]
        document["parity"]["targets"] = [target]

    uri = stores.store(tmp_path)
    finished = BundleRecord.read(bundle(tmp_path, manifest=change))
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run("0").info.run_id
    send_params(client, run_id, run_params.params(finished.manifest.config))
    client.log_batch(
        run_id, metrics=[Metric(name, value, 0, 0) for name, value in run_params.metrics(finished).items()]
    )
    run = client.get_run(run_id)
    assert sum(key.startswith("inputs.setting") for key in run.data.params) == 250
    assert run.data.metrics["parity.original.layer.399.max_abs"] >= 0


@pytest.mark.slow
def test_names_refused_by_mlflow_are_changed_and_stay_distinct(tmp_path: Path) -> None:
    """Users choose the names of settings and outputs, and one refused name failed the whole run."""
    names = ["a b", "a_b", "a?b", "<b>", "a//b", "../x", "/", ".", "é", "a\nb", "x" * 300, "x" * 301, "\ud800"]

    def change(document: dict[str, Any]) -> None:
        target = document["parity"]["targets"][0]
        target["outputs"] = [{**target["outputs"][0], "output": name} for name in names[:-1]]
        document["parity"]["targets"] = [target]

    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run("0").info.run_id
    send_params(client, run_id, run_params.params({"model": {"arguments": {name: i for i, name in enumerate(names)}}}))
    metrics = run_params.metrics(BundleRecord.read(bundle(tmp_path, manifest=change)))
    client.log_batch(run_id, metrics=[Metric(name, value, 0, 0) for name, value in metrics.items()])
    run = client.get_run(run_id)
    assert sorted(map(int, run.data.params.values())) == [*range(len(names))]
    assert run.data.params["model.arguments.a_b"] == "1"
    assert run.data.params["model.arguments.a b"] == "0"
    assert sum(key.endswith(".max_abs") or "xxx" in key for key in run.data.metrics) >= len(names) - 1
    assert run.data.metrics == metrics


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
