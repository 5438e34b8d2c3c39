"""Batches from a model registry: the newest version of each model is exported once."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from optexport import verify
from optexport.batch import from_registry
from optexport.batch.results import TaskResult
from optexport.cli.main import cli
from optexport.errors import TrackingError
from optexport.tracking.registry.query import Version, find_versions_to_export
from tests._helpers import stores

_TEMPLATE = """
[model]
source = "mlflow:models:/{{name}}/{{version}}"
[inputs]
tensors.x.shape = ["batch", 4]
dynamic.batch = [2, 8]
[parity]
effort = "quick"
[export]
formats = ["onnx"]
output = "bundles/{{name}}-{{version}}"
[tracking]
uri = "{uri}"
experiment = "nightly"
"""


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.linear(x)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a client for three registered models. Two have the tag, one of them with two versions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    uri = stores.store(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and mlflow warn about each other
        import mlflow
        import mlflow.pytorch

        mlflow.set_tracking_uri(uri)
        client = mlflow.MlflowClient(uri)
        client.create_experiment("models", artifact_location=(tmp_path / "artifacts").as_uri())
        mlflow.set_experiment("models")
        batch = torch.export.Dim("batch")
        program = torch.export.export(Doubled().eval(), (), {"x": torch.randn(3, 4)}, dynamic_shapes={"x": {0: batch}})
        folder = tmp_path / "logged"
        folder.mkdir()
        torch.export.save(program, folder / "model.pt2")
    for name, versions in (("asks", 2), ("asks-too", 1), ("silent", 1)):
        client.create_registered_model(name, tags={"export": "true"} if name.startswith("asks") else {})
        for _ in range(versions):
            client.create_model_version(name, source=_logged(mlflow, folder / "model.pt2"))
    (tmp_path / "nightly.toml").write_text(_TEMPLATE.format(uri=uri), encoding="utf-8")
    return client


def _logged(mlflow: Any, path: Path) -> str:
    with mlflow.start_run() as run:
        model = mlflow.models.Model(artifact_path="model", run_id=run.info.run_id)
        model.add_flavor("pytorch", model_data="data", pytorch_version="2", serialization_format="pt2")
        target = path.with_name("model")
        target.mkdir(exist_ok=True)
        model.save(str(target / "MLmodel"))
        (target / "data").mkdir(exist_ok=True)
        (target / "data" / "model.pt2").write_bytes(path.read_bytes())
        mlflow.log_artifacts(str(target), "model")
        return f"{run.info.artifact_uri}/model"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["batch", "nightly.toml", "--from-registry", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_newest_version_of_each_tagged_model_is_exported_once(registry: Any, tmp_path: Path) -> None:
    summary = json.loads(call("tags.export = 'true'", "--json").stdout)
    assert {row["config"]: row["exit_code"] for row in summary["configs"]} == {
        "nightly.asks-2.toml": 0,
        "nightly.asks-too-1.toml": 0,
    }, summary
    assert sorted(path.name for path in (tmp_path / "bundles").iterdir()) == ["asks-2", "asks-too-1"]
    verify(tmp_path / "bundles" / "asks-2")
    version = registry.get_model_version("asks", "2")
    run = registry.get_run(next(row["run_id"] for row in summary["configs"] if "asks-2" in row["config"]))
    assert version.tags["optexport.exported"] == run.data.tags["optexport.bundle"]
    deleted = from_registry.RegistryBatch(str(registry.tracking_uri), tmp_path, {"c": Version("gone", "1")}, [], [])
    with pytest.raises(TrackingError, match="the next batch will export it again"):
        deleted.mark_exported(TaskResult("c", "c", "", 0, output=str(tmp_path / "bundles" / "asks-2")))
    query = "tags.export = 'true'"
    again = json.loads(call(query, "--json").stdout)
    assert again["configs"] == []
    assert again["exit_code"] == 0
    nothing = call("tags.export = 'maybe'")
    assert nothing.exit_code == 0
    assert "Nothing to export: the filter matches no registered model." in nothing.output
    assert "the newest version of each matching model already has a bundle: asks, asks-too." in call(query).output


@pytest.mark.nightly
@pytest.mark.parametrize("quoted", ['a "quoted" name', "a?question", "an@alias"])
def test_model_with_an_invalid_name_is_one_failed_row(quoted: str, registry: Any, tmp_path: Path) -> None:
    registry.create_registered_model(quoted, tags={"odd": "true"})
    registry.create_model_version(quoted, source=registry.get_model_version("asks", "1").source)
    registry.set_registered_model_tag("silent", "odd", "true")
    summary = json.loads(call("tags.odd = 'true'", "--json").stdout)
    assert {row["config"]: row["exit_code"] for row in summary["configs"]} == {
        f"models:/{quoted}/1": 2,
        "nightly.silent-1.toml": 0,
    }


def test_placeholder_in_a_model_name_is_not_replaced() -> None:
    """Version 1 of a model named "x{version}" was replaced by model x1, and the wrong model was marked as exported."""
    text = 'source = "mlflow:models:/{name}/{version}"'
    assert from_registry._fill(text, Version("x{version}", "1")) == 'source = "mlflow:models:/x{version}/1"'


@pytest.mark.slow
def test_model_with_an_apostrophe_in_its_name_is_found(registry: Any, tmp_path: Path) -> None:
    """MLflow found no versions of it, and the batch reported that there was nothing to export."""
    registry.create_registered_model("it's", tags={"apostrophe": "true"})
    registry.create_model_version("it's", source=registry.get_model_version("asks", "1").source)
    assert find_versions_to_export(str(registry.tracking_uri), tmp_path, "tags.apostrophe = 'true'") == (
        [Version("it's", "1")],
        [],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "query", "code", "problem"),
    [
        (
            'source = "mlflow:models:/{name}/{version}"',
            'source = "x"',
            "name = 'a'",
            2,
            "nightly.toml: model.source: the value must contain",
        ),
        (
            "bundles/{name}-{version}",
            "bundles/{name}",
            "name = 'a'",
            2,
            "nightly.toml: export.output: the value must contain",
        ),
        ("", "", "tags export", 2, "--from-registry tags export: the filter is not valid"),
    ],
)
def test_invalid_template_or_filter_is_reported(
    registry: Any, tmp_path: Path, old: str, new: str, query: str, code: int, problem: str
) -> None:
    path = tmp_path / "nightly.toml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    result = call(query)
    assert result.exit_code == code, result.output
    assert problem in result.output
