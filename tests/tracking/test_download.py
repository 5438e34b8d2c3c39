"""Tests MLflow models of two flavours as sources, and the refusal of pickled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import transformers
from torch import nn

from optexport.config.schema import ModelConfig, TrackingConfig
from optexport.errors import ConfigError, SourceError
from optexport.loading.loader import load
from optexport.tracking import download_model
from tests._helpers import models, stores
from tests._helpers.models import randomise
from tests.tracking.bundles import QUIET

pytestmark = QUIET


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_pytorch_model_saved_as_pt2_is_a_source_by_its_alias(tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_extra_pt2_file_is_not_taken_for_the_model(tmp_path: Path) -> None:
    """The first file listed by the file system was loaded."""
    uri = stores.store(tmp_path)
    extra = tmp_path / "aaa.pt2"
    extra.write_bytes(b"another")
    x = np.ones((3, 4), np.float32)
    options = {"serialization_format": "pt2", "input_example": x, "extra_files": [str(extra)]}
    model_uri = log_pytorch(tmp_path, uri, randomise(nn.Linear(4, 2)), **options)
    (tmp_path / "downloaded").mkdir()
    path = download_model(model_uri, TrackingConfig(uri=uri), tmp_path, tmp_path / "downloaded")
    assert (path.parent.name, path.read_bytes() != b"another") == ("data", True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_pickled_pytorch_model_is_refused(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    model_uri = log_pytorch(tmp_path, uri, randomise(nn.Linear(4, 2)), serialization_format="pickle")
    (tmp_path / "downloaded").mkdir()
    with pytest.raises(SourceError, match="loading this model would run its own code") as caught:
        download_model(model_uri, TrackingConfig(uri=uri), tmp_path, tmp_path / "downloaded")
    assert 'serialization_format="pt2"' in str(caught.value)


def fetch(logged: Path, folder: Path) -> Path:
    """Logs a folder as a model and downloads it as a source."""
    uri = stores.store(folder)
    mlflow.set_tracking_uri(uri)
    experiment = mlflow.create_experiment("models", artifact_location=(folder / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(logged), "model")
    (folder / "downloaded").mkdir()
    return download_model(f"runs:/{run.info.run_id}/model", TrackingConfig(uri=uri), folder, folder / "downloaded")


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["{}", "../../victim", "model/../../../victim"])
def test_weights_outside_the_model_folder_are_refused(tmp_path: Path, elsewhere: str) -> None:
    """The tokenizer was copied to that path, over a module that a config names."""
    victim = tmp_path / "victim"
    logged = tmp_path / "logged"
    for folder, text in ((victim, "mine"), (logged / "components" / "tokenizer", "theirs")):
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(text)
    model = mlflow.models.Model(artifact_path="model")
    model.add_flavor("transformers", model_binary=elsewhere.format(victim))
    model.save(str(logged / "MLmodel"))
    with pytest.raises(SourceError, match="the model names weights outside of its folder: .*victim"):
        fetch(logged, tmp_path)
    assert (victim / "model.py").read_text() == "mine"
    assert not (tmp_path / "downloaded" / "victim").exists()


@pytest.mark.parametrize("uri", ["models:/nothing@here", "models:/nothing/1", "runs:/0123456789abcdef/model"])
def test_a_missing_model_is_one_clear_error(tmp_path: Path, uri: str) -> None:
    store = stores.store(tmp_path)
    with pytest.raises(SourceError, match=f"model.source: mlflow:{uri}"):
        download_model(uri, TrackingConfig(uri=store), tmp_path, tmp_path)


def test_a_batch_template_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="placeholders for the models of a registry\nHint: Run: optexport batch CONFIG --from-registry FILTER",
    ):
        download_model("models:/{name}/{version}", TrackingConfig(), tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flavors", ["{transformers: 3}", "[pytorch]", '{transformers: {model_binary: "a\\0b"}}', "{pytorch: [1]}", "3"]
)
def test_malformed_flavours_are_a_source_error(flavors: str, tmp_path: Path) -> None:
    """The error was reported as a defect of the program."""
    logged = tmp_path / "logged"
    logged.mkdir()
    (logged / "MLmodel").write_text(f"flavors: {flavors}\n")
    with pytest.raises(SourceError, match="model.source: mlflow:runs:/"):
        fetch(logged, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("binary", ["components/tokenizer", "MLmodel"])
def test_a_tokenizer_copy_failure_is_a_source_error(binary: str, tmp_path: Path) -> None:
    tokenizer = tmp_path / "logged" / "components" / "tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    (tmp_path / "logged" / "MLmodel").write_text(f"flavors: {{transformers: {{model_binary: {binary}}}}}\n")
    with pytest.raises(SourceError, match="the tokenizer of the model cannot be copied next to the weights"):
        fetch(tmp_path / "logged", tmp_path)
