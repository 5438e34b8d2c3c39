"""Exit codes and messages of ``optexport upload``, ``promote``, ``rollback`` and of ``run`` with ``[register]``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from click.testing import CliRunner, Result

from optexport.cli.main import cli
from tests._helpers import stores
from tests._helpers.cli import message
from tests.tracking.bundles import QUIET, bundle, registering

pytestmark = QUIET


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    before = mlflow.get_tracking_uri()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield stores.store(tmp_path)
    mlflow.set_tracking_uri(before)


def holder(uri: str, name: str = "block", alias: str = "champion") -> str:
    return str(mlflow.MlflowClient(uri).get_registered_model(name).aliases[alias])


@pytest.mark.slow
def test_run_registers_its_model_and_moves_the_alias_if_better(uri: str, tmp_path: Path) -> None:
    # Without format passes, whose defaults depend on the processor, a merged linear makes the file larger.
    config = stores.project(tmp_path, "sqlite:///mlflow.db", formats='["onnx"]\npasses = { onnx = [] }')
    text = f'{config.read_text()}[register]\nname = "block"\nalias = "best"\n'
    config.write_text(text.replace('use = "merge-linears"', 'use = "fuse-bias-in-linear"'))
    result = call("run", config)
    assert result.exit_code == 0, result.stderr
    assert "registry block version 1 holds best" in result.stdout
    # The larger file has the same outputs. The parity limit is too high to matter.
    config.write_text(f"{text}[register.max_regression]\nsize = 0.0\nparity = 1000.0\n")
    result = call("run", "--json", config)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["exit_code"]) == (6, 6), result.stderr
    assert document["registered"]["version"] == "2"
    assert document["error"].startswith("register: block version 2 is registered, and best is at version 1")
    assert "size: onnx has " in result.stderr
    assert (tmp_path / "out" / "block" / "manifest.json").is_file()
    assert holder(uri, alias="best") == "1"


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["--uri", "--config", "environment"])
def test_bundle_is_uploaded_to_the_specified_store(
    way: str, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bundle(tmp_path, manifest=registering())
    named: list[str | Path] = []
    if way == "--uri":
        named = ["--uri", uri]
    elif way == "--config":
        named = ["--config", stores.project(tmp_path, "sqlite:///mlflow.db")]
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    result = call("upload", place, *named)
    assert result.exit_code == 0, result.stderr
    assert f"{place}: uploaded, MLflow run " in result.stdout
    assert "block version 1 holds champion" in result.stdout
    again = json.loads(call("upload", place, *named, "--json").stdout)
    assert (again["already_uploaded"], again["passed"], again["registered"]["holder"]) == (True, True, "1")
    assert holder(uri) == "1"


@pytest.mark.slow
def test_version_is_promoted_and_rolled_back(uri: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert call("upload", bundle(tmp_path, manifest=registering()), "--uri", uri).exit_code == 0
    result = call("promote", "block", "1", "--uri", uri)
    assert (result.exit_code, result.stdout) == (0, "block: champion moved from version 2 to version 1\n")
    result = call("rollback", "block", "--uri", uri, "--json")
    assert json.loads(result.stdout) == {"name": "block", "alias": "champion", "version": "2", "before": "1"}
    assert holder(uri) == "2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["promote", "block", "1"], "--uri: no MLflow store is set"),
        (["rollback", "block"], "--uri: no MLflow store is set"),
        (["promote", "block", "1", "--uri", "URI"], "block: unknown registered model"),
        (["rollback", "block", "--uri", "URI"], "block: unknown registered model"),
        (["upload", "nowhere", "--uri", "URI"], "nowhere: the folder does not exist"),
        (["upload", "nowhere", "--config", "nowhere.toml"], "nowhere.toml: the config file does not exist"),
    ],
    ids=" ".join,
)
def test_usage_error_exits_with_2_and_one_message(arguments: list[str], words: str, uri: str) -> None:
    result = call(*[uri if argument == "URI" else argument for argument in arguments])
    assert words in message(result, 2)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["promote", "block", "1"], ["rollback", "block"]])
def test_unreachable_store_exits_with_7(command: list[str], tmp_path: Path) -> None:
    result = call(*command, "--uri", f"sqlite:///{tmp_path}/nowhere/mlflow.db")
    assert "The alias did not move" in message(result, 7)


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["promote", "block", "1"], ["rollback", "block"], ["upload", "nowhere"]])
def test_invalid_uri_is_a_usage_error_without_its_password(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in ("http://someone:hun/ter2@127.0.0.1:9", "http://someone:hun ter2@127.0.0.1:9", "htpp://127.0.0.1:9"):
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        error = message(call(*command, "--uri", uri), 2)
        assert error.startswith("--uri: ")
        assert "ter2" not in error
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert message(call(*command), 2).startswith("MLFLOW_TRACKING_URI: ")


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["latest", "v3", "the best"])
def test_invalid_alias_is_a_usage_error(alias: str, uri: str) -> None:
    for command in (("promote", "block", "1"), ("rollback", "block")):
        result = call(*command, "--uri", uri, "--alias", alias)
        assert (result.exit_code, result.stderr.splitlines()[0]) == (
            2,
            f'Error: --alias: "{alias}" is not a valid alias',
        )


@pytest.mark.slow
def test_traceback_contains_no_password(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of mlflow and requests, which are part of a traceback, contain the full address."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = call("--debug", "promote", "block", "1", "--uri", "http://someone:hunter2@127.0.0.1:9")
    assert result.exit_code == 7
    assert "Traceback" in result.stderr
    assert "hunter2" not in result.stderr
