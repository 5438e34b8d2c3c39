"""Tests the contents of an export's MLflow run in a local store."""

from __future__ import annotations

import datetime
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import pytest
from mlflow.entities import Run

from optexport.parity.verify import verify
from optexport.pipeline import run
from optexport.report.result import Result
from optexport.runtime import runners
from tests._helpers import exports, stores
from tests.tracking.bundles import QUIET

pytestmark = QUIET


class Tracked:
    """A successful run, and a client to inspect it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = stores.store(folder)
        subprocess.run(["git", "init", "-q", "-b", "work", str(folder)], check=True)
        git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
        remote = "https://someone:gitsecret@example.org/repository.git"
        subprocess.run([*git, "remote", "add", "origin", remote], check=True)
        self.commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        self.config = stores.project(folder, "sqlite:///mlflow.db")
        self.result: Result = run.run(self.config)
        self.client = mlflow.MlflowClient(self.uri)
        self.run: Run = self.client.get_run(str(self.result.run_id))

    def artifact(self, path: str) -> Path:
        return Path(self.client.download_artifacts(self.run.info.run_id, path, str(self.folder)))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    return Tracked(tmp_path_factory.mktemp("tracked"))


def test_the_run_is_finished_in_the_experiment_of_the_config(tracked: Tracked) -> None:
    assert tracked.result.tracking_failure is None
    assert tracked.run.info.status == "FINISHED"
    assert tracked.client.get_experiment(tracked.run.info.experiment_id).name == "tracked"
    assert mlflow.active_run() is None


def test_the_params_are_the_flattened_config(tracked: Tracked) -> None:
    params = tracked.run.data.params
    assert params["model.source"].startswith("python:tracked_")
    assert params["inputs.tensors.x.dtype"] == "float32"
    assert json.loads(params["inputs.tensors.x.shape"]) == ["batch", "sequence", 8]
    assert json.loads(params["inputs.dynamic.batch"]) == [1, 16]
    assert json.loads(params["export.formats"]) == ["onnx", "pt2"]
    assert params["parity.noise_multiple"] == "4.0"
    assert params["tracking.experiment"] == "tracked"


def test_the_tags_contain_commit_branch_versions_and_source(tracked: Tracked) -> None:
    tags = tracked.run.data.tags
    assert tags["mlflow.source.git.commit"] == tracked.commit.stdout.strip()
    assert tags["mlflow.source.git.branch"] == "work"
    assert tags["mlflow.source.git.repoURL"] == "https://***@example.org/repository.git"
    assert f"torch {metadata.version('torch')}, " in tags["optexport.versions"]
    assert tags["source"] == tracked.run.data.params["model.source"]
    assert tags["formats"] == "onnx, pt2"


def test_few_tags_have_plain_names(tracked: Tracked) -> None:
    plain = [name for name in tracked.run.data.tags if not name.startswith(("mlflow.", "optexport."))]
    assert sorted(plain) == ["formats", "source"]


def test_the_run_is_named_by_output_and_time(tracked: Tracked) -> None:
    name, _, date = str(tracked.run.info.run_name).partition(" ")
    assert name == tracked.result.output.name
    started = datetime.datetime.strptime(date, "%Y-%m-%d %H:%M:%S").astimezone()
    assert abs(started.timestamp() - tracked.run.info.start_time / 1000) < 2


def test_the_metrics_contain_parity_nodes_sizes_and_seconds(tracked: Tracked) -> None:
    metrics, manifest = tracked.run.data.metrics, tracked.result.manifest
    assert metrics["parity/passed"] == 1.0
    assert metrics["parity/worst_share_of_tolerance"] == manifest.parity.used_share
    assert metrics["parity/cases"] == len(manifest.parity.cases)
    for target in ("graph", "onnx", "onnx-optimized", "pt2"):
        assert 0 <= metrics[f"parity/{target}_share_of_tolerance"] <= metrics["parity/worst_share_of_tolerance"] < 1
    assert metrics["graph/changes"] == 1
    sizes = {file.path: file.size for file in manifest.files}
    assert metrics["files/onnx_mb"] == sizes["model.onnx"] / 1e6
    assert metrics["files/bundle_mb"] == pytest.approx(sum(sizes.values()) / 1e6)
    assert metrics["time/total_seconds"] > metrics["time/trace_seconds"] > 0


def test_the_artifacts_contain_bundle_config_and_changed_nodes(tracked: Tracked) -> None:
    downloaded = tracked.artifact("bundle")
    here = {path.name: path.read_bytes() for path in tracked.result.output.iterdir()}
    assert {path.name: path.read_bytes() for path in downloaded.iterdir()} == here
    assert all(target.passed for target in verify(downloaded).targets)
    assert tracked.artifact("report.html").read_bytes() == (downloaded / "report.html").read_bytes()
    assert tracked.artifact("config.toml").read_text() == tracked.config.read_text()
    table = json.loads(tracked.artifact("tables/transformed_nodes.json").read_text())
    (row,) = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert row["rule"] == "merge-linears"
    assert [row["node"]] == tracked.result.transformed_nodes["merge-linears"]
    assert len(row["replaced"].split(", ")) == 3


def test_the_artifacts_are_stored_next_to_the_config(tracked: Tracked) -> None:
    assert str(tracked.run.info.artifact_uri).startswith((tracked.folder / "mlartifacts").as_uri())


def logged_uri(tracked: Tracked) -> str:
    mlflow.set_tracking_uri(tracked.uri)
    (output,) = tracked.run.outputs.model_outputs
    return f"models:/{output.model_id}"


@pytest.fixture(scope="module")
def logged_model(tracked: Tracked) -> Any:
    """Returns the logged model, loaded by MLflow."""
    return mlflow.pyfunc.load_model(logged_uri(tracked))


def test_the_logged_model_matches_the_bundle_at_other_sizes(tracked: Tracked, logged_model: Any) -> None:
    names = [output.name for output in tracked.result.manifest.outputs]
    run = runners.open_onnx(tracked.result.files["onnx"], names, optimized=True)
    for size, sequence in ((1, 3), (7, 11)):
        batch = exports.batch(size, sequence)
        expected = run(batch)
        outputs = logged_model.predict({name: tensor.numpy() for name, tensor in batch.items()})
        assert list(outputs) == names
        for name in names:
            np.testing.assert_array_equal(outputs[name], expected[name].numpy())


def test_the_logged_models_signature_leaves_dynamic_axes_open(logged_model: Any) -> None:
    signature = logged_model.metadata.signature
    assert [(s.name, s.type, s.shape) for s in signature.inputs] == [
        ("x", np.dtype("float32"), (-1, -1, 8)),
        ("mask", np.dtype("int64"), (-1, -1)),
    ]
    assert [(s.name, s.shape) for s in signature.outputs] == [("hidden", (-1, -1, 8)), ("longest", ())]


def test_the_logged_model_names_its_requirements_and_weights(tracked: Tracked, logged_model: Any) -> None:
    assert logged_model.metadata.metadata["weights_sha256"] == tracked.result.manifest.model.weights_sha256
    requirements = Path(mlflow.pyfunc.get_model_dependencies(logged_uri(tracked))).read_text()
    assert f"onnx=={onnx.__version__}" in requirements


def test_the_result_links_to_the_run_page(tracked: Tracked) -> None:
    page = str(tracked.result.run_page)
    path = f"#/experiments/{tracked.run.info.experiment_id}/runs/{tracked.run.info.run_id}"
    assert page.endswith(f"/{path}?workflowType=machine_learning")


def test_mlflows_page_reads_the_kind_of_workflow_from_the_address() -> None:
    (script,) = Path(mlflow.__file__).parent.glob("server/js/build/static/js/main.*.js")
    text = script.read_text(encoding="utf-8")
    assert '.get("workflowType")' in text
    assert '.MACHINE_LEARNING="machine_learning"' in text


def test_tables_and_figures_show_the_distance_of_each_target(tracked: Tracked) -> None:
    table = json.loads(tracked.artifact("tables/parity.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    targets = tracked.result.manifest.parity.targets
    assert [(row["target"], row["output"]) for row in rows] == [
        (p.target, o.output) for p in targets for o in p.outputs
    ]
    assert [row["distance"] for row in rows] == [o.max_abs for p in targets for o in p.outputs]
    for name, drawn in (("parity.png", True), ("latency.png", False)):
        listed = [file for file in tracked.client.list_artifacts(tracked.run.info.run_id) if file.path == name]
        assert len(listed) == drawn
    assert tracked.artifact("parity.png").read_bytes().startswith(b"\x89PNG")


def test_each_rule_is_a_step_of_the_node_count(tracked: Tracked) -> None:
    (rule,) = tracked.result.manifest.transformations
    history = tracked.client.get_metric_history(tracked.run.info.run_id, "graph/nodes")
    assert [(m.step, m.value) for m in history] == [(0, rule.nodes_before), (1, rule.nodes_after)]
    table = json.loads(tracked.artifact("tables/transformations.json").read_text())
    assert table["data"] == [["merge-linears", "", rule.nodes_before, rule.nodes_after, 1, len(rule.near_misses)]]


def test_the_traced_inputs_are_a_dataset_of_the_run(tracked: Tracked) -> None:
    (dataset_input,) = tracked.run.inputs.dataset_inputs
    assert [(tag.key, tag.value) for tag in dataset_input.tags] == [("mlflow.data.context", "parity")]
    assert dataset_input.dataset.name == "traced"
    assert dataset_input.dataset.digest
    source = json.loads(dataset_input.dataset.source)["tags"]
    assert source["file"] == "bundle/reference.safetensors"
    assert source["optexport.bundle"] == tracked.run.data.tags["optexport.bundle"]
    features = json.loads(dataset_input.dataset.schema)["mlflow_tensorspec"]["features"]
    assert {"x", "mask"} <= {spec["name"] for spec in json.loads(features)} if isinstance(features, str) else features


def test_pytorch_files_are_artifacts_and_not_pickled_models(tracked: Tracked) -> None:
    models_logged = tracked.client.search_logged_models([tracked.run.info.experiment_id])
    assert [model.name for model in models_logged] == ["model"]
    assert (tracked.artifact("bundle") / "model.pt2").is_file()
