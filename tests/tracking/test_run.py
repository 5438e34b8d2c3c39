"""The MLflow run, in an embedded store: what it holds, what becomes of it when something fails, and no secrets."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import pytest
import torch
import transformers
from mlflow.entities import Metric, Run
from torch import nn

from optexport import pipeline, runtimes
from optexport.config import ModelConfig, TrackingConfig
from optexport.errors import ParityError, SourceError, redact
from optexport.pipeline import Result
from optexport.sources import load
from optexport.stages import Stages
from optexport.tracking import download_model, facts, store
from optexport.tracking.facts import Finished
from optexport.tracking.sending import send_params
from optexport.verification import verify
from tests import exports, models, stores
from tests.models import randomise
from tests.tracking.bundles import QUIET, bundle

pytestmark = QUIET


class Tracked:
    """A run that ended well, and the client to look at it with."""

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
        self.result: Result = pipeline.run(self.config)
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
    assert params["parity.multiple"] == "4.0"
    assert params["tracking.experiment"] == "tracked"


def test_the_tags_tell_commit_branch_versions_and_source(tracked: Tracked) -> None:
    tags = tracked.run.data.tags
    assert tags["mlflow.source.git.commit"] == tracked.commit.stdout.strip()
    assert tags["mlflow.source.git.branch"] == "work"
    assert tags["mlflow.source.git.repoURL"] == "https://***@example.org/repository.git"
    assert tags["torch"] == torch.__version__
    assert tags["onnx"] == onnx.__version__
    assert tags["source"] == tracked.run.data.params["model.source"]


def test_the_metrics_tell_parity_nodes_sizes_and_seconds(tracked: Tracked) -> None:
    metrics, manifest = tracked.run.data.metrics, tracked.result.manifest
    assert metrics["nodes.before"] == manifest.nodes_before
    assert metrics["nodes.after"] == manifest.nodes_after
    assert metrics["merge-linears.changes"] == 1
    assert metrics["merge-linears.nodes_after"] == metrics["merge-linears.nodes_before"] + 1
    for place in ("original", "transformed_graph", "onnx", "onnx_optimised", "pt2"):
        assert metrics[f"parity.{place}.hidden.max_abs"] >= 0
        assert metrics[f"parity.{place}.hidden.cosine"] == pytest.approx(1.0)
        assert metrics[f"parity.{place}.longest.argmax_agreement"] == 1.0
    assert metrics["parity.original.hidden.multiple"] == 1.0
    for file in manifest.files:
        assert metrics[f"bytes.{file.path}"] == file.size
    assert metrics["seconds.trace"] > 0


def test_the_artifacts_hold_the_bundle_the_config_and_the_changed_nodes(tracked: Tracked) -> None:
    downloaded = tracked.artifact("bundle")
    here = {path.name: path.read_bytes() for path in tracked.result.output.iterdir()}
    assert {path.name: path.read_bytes() for path in downloaded.iterdir()} == here
    assert all(place.passed for place in verify(downloaded).places)
    assert tracked.artifact("report.html").read_bytes() == (downloaded / "report.html").read_bytes()
    assert tracked.artifact("config.toml").read_text() == tracked.config.read_text()
    table = json.loads(tracked.artifact("transformed_nodes.json").read_text())
    (row,) = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert row["rule"] == "merge-linears"
    assert [row["node"]] == tracked.result.transformed_nodes["merge-linears"]
    assert len(row["replaced"].split(", ")) == 3


def test_the_artifacts_lie_beside_the_config_wherever_the_program_is_called(tracked: Tracked) -> None:
    assert str(tracked.run.info.artifact_uri).startswith((tracked.folder / "mlartifacts").as_uri())


def logged_uri(tracked: Tracked) -> str:
    mlflow.set_tracking_uri(tracked.uri)
    (output,) = tracked.run.outputs.model_outputs
    return f"models:/{output.model_id}"


@pytest.fixture(scope="module")
def logged_model(tracked: Tracked) -> Any:
    """The model that the run logged, as MLflow's own way of loading one gives it."""
    return mlflow.pyfunc.load_model(logged_uri(tracked))


def test_the_logged_model_predicts_what_the_bundle_computes_at_another_size(
    tracked: Tracked, logged_model: Any
) -> None:
    names = [output.name for output in tracked.result.manifest.outputs]
    run = runtimes.open_onnx(tracked.result.files["onnx"], names, optimised=True)
    for size, sequence in ((1, 3), (7, 11)):
        batch = exports.batch(size, sequence)
        want = run(batch)
        got = logged_model.predict({name: tensor.numpy() for name, tensor in batch.items()})
        assert list(got) == names
        for name in names:
            np.testing.assert_array_equal(got[name], want[name].numpy())


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


def test_the_run_can_be_opened_with_what_the_result_tells(tracked: Tracked) -> None:
    page = str(tracked.result.run_page)
    assert f"#/experiments/{tracked.run.info.experiment_id}/runs/{tracked.run.info.run_id}" in page


WRONG = """
import torch
from optexport.transformations import Transformation

class Relu(Transformation):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.target, node.kwargs = torch.ops.aten.relu.default, {}
                self.mark_as_transformed(node)
        return graph_module
"""


def only_run(uri: str) -> Run:
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("tracked")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def test_a_run_that_fails_is_marked_failed_with_the_reason(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    (tmp_path / "wrong_tracked_rule.py").write_text(WRONG)
    config = stores.project(tmp_path, uri, '[[transformations]]\nuse = "python:wrong_tracked_rule:Relu"')
    with pytest.raises(ParityError) as caught:
        pipeline.run(config)
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert run.data.tags["optexport.blame.failure"] == str(caught.value)
    assert run.data.params["tracking.experiment"] == "tracked"
    assert run.data.metrics == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_run_that_is_interrupted_is_marked_failed_too(tmp_path: Path, error: type[BaseException]) -> None:
    uri = stores.store(tmp_path)

    def announce(name: str, seconds: float | None) -> None:
        if name == "trace":
            raise error

    with pytest.raises(error):
        pipeline.run(stores.project(tmp_path, uri), stages=Stages(announce))
    run = only_run(uri)
    assert run.info.status in ("FAILED", "KILLED")
    assert run.data.tags["optexport.blame.failure"] == error.__name__


def test_two_runs_of_one_experiment_stand_side_by_side(tmp_path: Path) -> None:
    config = stores.project(tmp_path, stores.store(tmp_path), formats='["pt2"]')
    one, other = pipeline.run(config), pipeline.run(config)
    assert one.run_id != other.run_id
    assert one.tracking_failure is other.tracking_failure is None


def test_without_tracking_there_is_no_run_and_no_store(tmp_path: Path) -> None:
    config = stores.project(tmp_path, "sqlite:///mlflow.db", formats='["pt2"]')
    config.write_text(config.read_text().replace("[tracking]", "[tracking]\nenabled = false"))
    result = pipeline.run(config)
    assert (result.run_id, result.run_page, result.tracking_failure) == (None, None, None)
    assert not (tmp_path / "mlflow.db").exists()


def test_a_store_that_cannot_take_the_artifacts_fails_the_run_and_not_the_bundle(tmp_path: Path) -> None:
    """The run must not look as if it went on for ever, and the next one must not find it open."""
    uri = stores.store(tmp_path)
    (tmp_path / "mlartifacts").write_text("a file where a folder should be")
    config = stores.project(tmp_path, uri, formats='["pt2"]')
    result = pipeline.run(config)
    assert result.tracking_failure is not None
    assert result.tracking_failure.exit_code == 7
    assert "The bundle is whole on disk" in str(result.tracking_failure)
    assert all(place.passed for place in verify(result.output).places)
    assert only_run(uri).info.status == "FAILED"
    (tmp_path / "mlartifacts").unlink()
    assert pipeline.run(config).tracking_failure is None


def test_a_store_that_is_none_fails_the_tracking_and_not_the_work(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, but it is long enough to be read as one" * 20)
    result = pipeline.run(stores.project(tmp_path, "sqlite:///mlflow.db", formats='["pt2"]'))
    assert result.tracking_failure is not None
    assert result.run_id is None
    assert all(place.passed for place in verify(result.output).places)


SECRET = "hunter2"
SECRET_URIS = [
    f"http://someone:{SECRET}@127.0.0.1:9",
    f"http://{SECRET}@127.0.0.1:9",
    f"http://someone:pa@{SECRET}@127.0.0.1:9",
    f"https://127.0.0.1:9/?token={SECRET}",
    f"https://127.0.0.1:9/?a=b&api_key={SECRET}&c=d",
    f"https://127.0.0.1:9/?api-key={SECRET}",
    f"https://127.0.0.1:9/?apikey={SECRET}",
    f"mysql+pymysql://root:{SECRET}@127.0.0.1:9/db",
    f"postgresql://127.0.0.1:9/db?user=me&password={SECRET}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BUID%3Dme%3BPWD%3D{SECRET}",
    f"mssql+pyodbc://127.0.0.1/db?Pwd={SECRET}",
    f"mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3D%7Ba%3B{SECRET}%7D",
    f"postgresql://127.0.0.1:9/db?password=a%26{SECRET}&user=me",
    f"postgresql://someone:a/{SECRET}@127.0.0.1:9/db",
    f"postgresql://someone:it's{SECRET}@127.0.0.1:9/db",
]


@pytest.mark.parametrize("uri", SECRET_URIS)
def test_no_secret_of_a_uri_stays_in_a_text(uri: str) -> None:
    for text in (uri, f"cannot connect to {uri}: refused", f'uri = "{uri}"', f"({uri})\n{uri}"):
        assert SECRET not in redact(text)
    assert "127.0.0.1" in redact(f"http://someone:{SECRET}@127.0.0.1:9")


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///mlflow.db",
        "sqlite:////home/a@b/mlflow.db",
        "http://127.0.0.1:5000",
        "http://127.0.0.1:5000/name@alias",
        '{"uri":"http://127.0.0.1:5000","model":"name@alias"}',
        "mlflow:models:/name@alias",
        "user@example.org",
        "a=b",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def test_no_secret_of_the_tracking_uri_gets_out_of_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"http://someone:{SECRET}@127.0.0.1:{closed_port()}"
    result = pipeline.run(stores.project(tmp_path, uri, formats='["pt2"]'))
    assert result.tracking_failure is not None
    assert SECRET not in str(result.tracking_failure)
    assert SECRET not in str(result.run_page)
    for path in result.output.iterdir():
        assert SECRET.encode() not in path.read_bytes(), path.name
    written = capfd.readouterr()
    assert SECRET not in written.out + written.err


def log_transformers(folder: Path, uri: str) -> str:
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("models", artifact_location=(folder / "artifacts").as_uri())
    mlflow.set_experiment("models")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"word{i}" for i in range(55)]]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    with mlflow.start_run():
        info = mlflow.transformers.log_model(
            {"model": models.model("bert"), "tokenizer": tokenizer},
            name="bert",
            task="feature-extraction",
            pip_requirements=["transformers"],
        )
    return str(info.model_uri)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_the_transformers_flavour_is_a_source(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    model_uri = log_transformers(tmp_path, uri)
    (tmp_path / "downloaded").mkdir()
    downloaded = download_model(model_uri, TrackingConfig(uri=uri), tmp_path, tmp_path / "downloaded")
    loaded = load(ModelConfig(source=f"mlflow:{model_uri}"), tmp_path, downloaded)
    original = models.model("bert").state_dict()
    assert all(torch.equal(value, original[name]) for name, value in loaded.model.state_dict().items())
    assert loaded.revision == model_uri
    assert loaded.pretrained is not None
    assert transformers.AutoTokenizer.from_pretrained(loaded.pretrained.name)("word3")["input_ids"] == [2, 8, 3]


def log_pytorch(folder: Path, uri: str, model: nn.Module, **options: Any) -> str:
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("models", artifact_location=(folder / "artifacts").as_uri())
    mlflow.set_experiment("models")
    with mlflow.start_run():
        info = mlflow.pytorch.log_model(model, name="net", pip_requirements=["torch"], **options)
    return str(info.model_uri)


@pytest.mark.filterwarnings("ignore")
def test_a_pytorch_model_kept_as_pt2_is_a_source_by_its_alias(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    model = randomise(nn.Linear(4, 2))
    x = np.ones((3, 4), np.float32)
    model_uri = log_pytorch(tmp_path, uri, model, serialization_format="pt2", input_example=x)
    version = mlflow.register_model(model_uri, "net").version
    mlflow.MlflowClient().set_registered_model_alias("net", "good", version)
    (tmp_path / "downloaded").mkdir()
    downloaded = download_model("models:/net@good", TrackingConfig(uri=uri), tmp_path, tmp_path / "downloaded")
    loaded = load(ModelConfig(source="mlflow:models:/net@good"), tmp_path, downloaded)
    assert loaded.program is not None
    assert torch.equal(next(iter(loaded.model.parameters())), model.weight)


@pytest.mark.filterwarnings("ignore")
def test_a_pickled_pytorch_model_is_refused(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    model_uri = log_pytorch(tmp_path, uri, randomise(nn.Linear(4, 2)), serialization_format="pickle")
    (tmp_path / "downloaded").mkdir()
    with pytest.raises(SourceError, match="only running its code could load") as caught:
        download_model(model_uri, TrackingConfig(uri=uri), tmp_path, tmp_path / "downloaded")
    assert 'serialization_format="pt2"' in str(caught.value)


@pytest.mark.parametrize("uri", ["models:/nothing@here", "models:/nothing/1", "runs:/0123456789abcdef/model"])
def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path, uri: str) -> None:
    store = stores.store(tmp_path)
    with pytest.raises(SourceError, match=f"model.source: mlflow:{uri}"):
        download_model(uri, TrackingConfig(uri=store), tmp_path, tmp_path)


def test_a_relative_store_lies_beside_the_config(tmp_path: Path) -> None:
    assert store.resolved_uri("sqlite:///mlflow.db", tmp_path) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    for uri in (f"sqlite:///{tmp_path}/x.db", "http://127.0.0.1:5000", "databricks"):
        assert store.resolved_uri(uri, tmp_path) == uri


def test_tables_and_figures_show_how_near_the_files_are(tracked: Tracked) -> None:
    table = json.loads(tracked.artifact("parity.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    places = tracked.result.manifest.parity.places
    assert [(row["place"], row["output"]) for row in rows] == [(p.place, o.output) for p in places for o in p.outputs]
    assert [row["distance"] for row in rows] == [o.max_abs for p in places for o in p.outputs]
    for name, drawn in (("parity.png", True), ("latency.png", False)):
        listed = [file for file in tracked.client.list_artifacts(tracked.run.info.run_id) if file.path == name]
        assert len(listed) == drawn
    assert tracked.artifact("parity.png").read_bytes().startswith(b"\x89PNG")


def test_each_rule_is_a_step_of_the_metrics(tracked: Tracked) -> None:
    (rule,) = tracked.result.manifest.transformations
    history = {
        name: [(m.step, m.value) for m in tracked.client.get_metric_history(tracked.run.info.run_id, f"rules.{name}")]
        for name in ("nodes", "changes", "near_misses")
    }
    assert history["nodes"] == [(0, rule.nodes_before), (1, rule.nodes_after)]
    assert history["changes"] == [(1, 1)]
    assert history["near_misses"] == [(1, len(rule.near_misses))]


def test_the_traced_inputs_are_a_dataset_of_the_run(tracked: Tracked) -> None:
    (found,) = tracked.run.inputs.dataset_inputs
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "parity")]
    assert found.dataset.name == "traced"
    assert found.dataset.digest
    source = json.loads(found.dataset.source)["tags"]
    assert source["file"] == "bundle/reference.safetensors"
    assert source["optexport.bundle"] == tracked.run.data.tags["optexport.bundle"]
    features = json.loads(found.dataset.schema)["mlflow_tensorspec"]["features"]
    assert {"x", "mask"} <= {spec["name"] for spec in json.loads(features)} if isinstance(features, str) else features


def test_files_of_pytorch_are_artifacts_and_not_pickled_models(tracked: Tracked) -> None:
    models_logged = tracked.client.search_logged_models([tracked.run.info.experiment_id])
    assert [model.name for model in models_logged] == ["model"]
    assert (tracked.artifact("bundle") / "model.pt2").is_file()


def test_a_config_in_no_repository_is_not_told_to_be_of_this_program(tmp_path: Path) -> None:
    """mlflow would name the commit of the program that calls it."""
    uri = stores.store(tmp_path)
    pipeline.run(stores.project(tmp_path, uri, formats='["pt2"]'))
    assert [tag for tag in only_run(uri).data.tags if tag.startswith("mlflow.source.git")] == []


def test_many_settings_and_many_metrics_are_all_logged(tmp_path: Path) -> None:
    """A config of many inputs, and a model of many outputs, go past what one request may hold."""

    def change(document: dict[str, Any]) -> None:
        document["config"]["inputs"] = {f"setting_{i}": {"inner": i} for i in range(250)}
        place = document["parity"]["places"][0]
        place["outputs"] = [{**place["outputs"][0], "output": f"layer.{i}"} for i in range(400)]
        document["parity"]["places"] = [place]

    uri = stores.store(tmp_path)
    finished = Finished.read(bundle(tmp_path, manifest=change))
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run("0").info.run_id
    send_params(client, run_id, finished.manifest.config)
    client.log_batch(run_id, metrics=[Metric(name, value, 0, 0) for name, value in facts.metrics(finished).items()])
    run = client.get_run(run_id)
    assert sum(key.startswith("inputs.setting") for key in run.data.params) == 250
    assert run.data.metrics["parity.original.layer.399.max_abs"] >= 0


def test_names_that_mlflow_does_not_take_are_changed_and_none_hides_another(tmp_path: Path) -> None:
    """Names of settings and outputs are the user's: one that MLflow refused cost the whole run."""
    names = ["a b", "a_b", "a?b", "<b>", "a//b", "../x", "/", ".", "é", "a\nb", "x" * 300, "x" * 301, "\ud800"]

    def change(document: dict[str, Any]) -> None:
        place = document["parity"]["places"][0]
        place["outputs"] = [{**place["outputs"][0], "output": name} for name in names[:-1]]
        document["parity"]["places"] = [place]

    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    run_id = client.create_run("0").info.run_id
    send_params(client, run_id, {"model": {"arguments": {name: number for number, name in enumerate(names)}}})
    metrics = facts.metrics(Finished.read(bundle(tmp_path, manifest=change)))
    client.log_batch(run_id, metrics=[Metric(name, value, 0, 0) for name, value in metrics.items()])
    run = client.get_run(run_id)
    assert sorted(map(int, run.data.params.values())) == [*range(len(names))]
    assert run.data.params["model.arguments.a_b"] == "1"
    assert run.data.params["model.arguments.a b"] == "0"
    assert sum(key.endswith(".max_abs") or "xxx" in key for key in run.data.metrics) >= len(names) - 1
    assert run.data.metrics == metrics


def test_a_long_setting_is_cut_and_says_so() -> None:
    text = facts.params({"inputs": {"texts": ["word " * 50] * 40}})["inputs.texts"]
    assert text.endswith("...")
    assert len(text) <= 6000


def test_a_database_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    """mlflow itself tries for two minutes."""
    with pytest.raises(sqlite3.OperationalError, match="unable to open database file"):
        store.open_store(f"sqlite:///{tmp_path}/no such folder/mlflow.db", tmp_path)


def test_a_users_own_setting_of_telemetry_and_patience_stays() -> None:
    names = ("MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    code = f"""
import os
import optexport
from optexport.tracking import store
store.import_mlflow()
with store.hastily():
    print(*[os.environ[name] for name in {names}])
import huggingface_hub.constants, mlflow.telemetry.utils
print(huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY, os.environ["MLFLOW_DISABLE_TELEMETRY"])
"""
    plain = {key: value for key, value in os.environ.items() if key not in names}

    def told(**settings: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env={**plain, **settings}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert told() == "true 1 5\nTrue true\n"
    chosen = dict(zip(names, ("false", "0", "77"), strict=True))
    assert told(**chosen) == "false 0 77\nFalse false\n"
