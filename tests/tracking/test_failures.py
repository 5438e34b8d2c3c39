"""Tests the MLflow run and the bundle after a failure of the export or the store."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import sqlalchemy
import torch
from click.testing import CliRunner
from mlflow.exceptions import MlflowException

import optexport
from optexport.cli.main import cli
from optexport.config.schema import TrackingConfig
from optexport.errors import ConfigError, ModelError, SourceError, TraceError, TrackingError, UntraceableError
from optexport.parity.verify import verify
from optexport.pipeline import run as pipeline_run
from optexport.tracking import store
from optexport.tracking.registry import promotion
from optexport.tracking.run import Tracker, new_run, tracking
from optexport.tracking.upload import upload_bundle
from tests._helpers import stores
from tests._helpers.servers import answering
from tests.tracking.bundles import QUIET, bundle, only_run, runs

pytestmark = QUIET


def in_forward(folder: Path, statement: str) -> None:
    """Makes the model of a project execute a statement when it runs."""
    (module,) = folder.glob("tracked_*.py")
    module.write_text(
        f"import os\nimport torch\nfrom tests._helpers.exports import Block\n\n\nclass Odd(Block):\n"
        f"    def forward(self, x, mask):\n        {statement}\n        return super().forward(x, mask)\n\n\n"
        "def load():\n    return Odd().eval()\n"
    )


FAILS = "raise RuntimeError('no such size')"


def test_a_failing_run_is_marked_failed_with_the_reason(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    in_forward(tmp_path, f"if torch.compiler.is_exporting():\n            {FAILS}")
    with pytest.raises(UntraceableError) as caught:
        pipeline_run.run(config)
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert run.data.tags["optexport.failure"] == str(caught.value)
    assert run.data.tags["mlflow.note.content"].startswith("**FAILED**\n\n    ")
    assert "no such size" in run.data.tags["mlflow.note.content"]
    assert run.data.params["tracking.experiment"] == "tracked"
    assert run.data.metrics == {}
    assert caught.value.run_id == run.info.run_id


def test_json_of_a_failed_run_names_its_mlflow_run(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    in_forward(tmp_path, f"if torch.compiler.is_exporting():\n            {FAILS}")
    result = CliRunner().invoke(cli, ["run", str(config), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["mlflow_run_id"]) == (3, only_run(uri).info.run_id)


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        ("def load():\n    raise RuntimeError('no weights')\n", SourceError),
        ("def lood(): ...\n", ConfigError),
        ("[parity.metrics]\ncosine = { min = 0.5, output = 'none' }\n", ConfigError),
    ],
)
def test_a_mistake_in_the_source_or_the_config_leaves_no_run(
    tmp_path: Path, mistake: str, kind: type[Exception]
) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    if mistake.startswith("["):
        config.write_text(config.read_text() + mistake)
    else:
        (module,) = tmp_path.glob("tracked_*.py")
        module.write_text(mistake)
    with pytest.raises(kind):
        pipeline_run.run(config)
    assert runs(uri, "tracked") == []


def test_a_model_that_fails_on_its_inputs_starts_no_run(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    in_forward(tmp_path, FAILS)
    with pytest.raises(ModelError, match="no such size"):
        pipeline_run.run(config)
    tracked = {"uri": uri, "experiment": "tracked"}
    for model, message in (
        (torch.nn.Linear(3, 3), "the model is in train mode"),
        (torch.nn.Linear(4, 4).eval(), r"the model itself fails on the inputs input \[2, 3\]"),
    ):
        with pytest.raises(TraceError, match=message):
            optexport.export(model, {"input": torch.ones(2, 3)}, tmp_path / "out" / "linear", tracking=tracked)
    assert mlflow.MlflowClient(uri).get_experiment_by_name("tracked") is None


@pytest.mark.slow
def test_a_declared_size_that_the_model_rejects_leaves_no_run(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    in_forward(tmp_path, f"if not torch.compiler.is_exporting() and x.shape[0] > 8:\n            {FAILS}")
    with pytest.raises(ModelError, match="no such size"):
        pipeline_run.run(config)
    assert runs(uri, "tracked") == []


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (SystemExit(128 + signal.SIGTERM), "KILLED", "interrupted"),
        (SystemExit(2), "FAILED", "2"),
        (SystemExit("usage"), "FAILED", "usage"),
        (MemoryError(), "FAILED", "MemoryError"),
    ],
)
def test_an_interrupt_ends_a_run_as_killed_and_an_error_as_failed(
    tmp_path: Path, error: BaseException, status: str, reason: str
) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    tracker = Tracker(config, tmp_path / "config.toml", tmp_path / "out")
    with pytest.raises(type(error)), tracking(tracker, {}, {}):
        raise error
    run = only_run(config.uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == (status, reason)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_command_run_ends_the_run_as_killed(tmp_path: Path, number: int, code: int) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    in_forward(tmp_path, f"torch.compiler.is_exporting() and os.kill(os.getpid(), {number:d})")
    result = CliRunner().invoke(cli, ["run", str(config)])
    assert result.exit_code == code, result.output
    run = only_run(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("KILLED", "interrupted")


def test_a_run_interrupted_at_its_creation_ends_as_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id was unknown, so the run stayed RUNNING."""
    uri = stores.store(tmp_path)
    create_run = mlflow.MlflowClient.create_run

    def interrupted(*args: Any, **options: Any) -> None:
        create_run(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline_run.run(stores.project(tmp_path, uri))
    run = only_run(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("KILLED", "interrupted")


@pytest.mark.slow
def test_a_run_interrupted_at_its_end_can_be_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = stores.store(tmp_path)
    ended = mlflow.MlflowClient.set_terminated

    def interrupted(client: Any, run_id: str, status: str | None = None) -> None:
        if status is None:
            raise KeyboardInterrupt
        ended(client, run_id, status)

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", interrupted)
    config = stores.project(tmp_path, uri, formats='["pt2"]')
    with pytest.raises(KeyboardInterrupt) as caught:
        pipeline_run.run(config)
    (note,) = caught.value.__notes__
    assert note.startswith("The bundle on disk is complete. To upload it, run: optexport upload ")
    run = only_run(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("KILLED", "interrupted")
    monkeypatch.undo()
    upload_bundle(tmp_path / "out" / "block", uri)
    assert only_run(uri).info.status == "FINISHED"


@pytest.mark.slow
def test_a_failed_artifact_upload_does_not_fail_the_bundle(tmp_path: Path) -> None:
    """The run must not stay RUNNING, and the next run must not find it open."""
    uri = stores.store(tmp_path)
    (tmp_path / "mlartifacts").write_text("a file where a folder should be")
    config = stores.project(tmp_path, uri, formats='["pt2"]')
    result = pipeline_run.run(config)
    assert result.tracking_failure is not None
    assert result.tracking_failure.exit_code == 7
    assert "The bundle on disk is complete" in str(result.tracking_failure)
    assert all(target.passed for target in verify(result.output).targets)
    assert only_run(uri).info.status == "FAILED"
    (tmp_path / "mlartifacts").unlink()
    assert pipeline_run.run(config).tracking_failure is None


@pytest.mark.slow
def test_an_invalid_store_fails_tracking_but_not_the_export(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, but it is long enough to be read as one" * 20)
    result = pipeline_run.run(stores.project(tmp_path, "sqlite:///mlflow.db", formats='["pt2"]'))
    assert result.tracking_failure is not None
    assert result.run_id is None
    assert all(target.passed for target in verify(result.output).targets)


def test_an_unwritable_database_is_reported_at_once(tmp_path: Path) -> None:
    """MLflow itself retries for two minutes."""
    with pytest.raises(sqlite3.OperationalError, match="unable to open database file"):
        store.open_store(f"sqlite:///{tmp_path}/no such folder/mlflow.db", tmp_path)


@pytest.mark.slow
def test_a_database_error_shows_only_the_message_of_its_driver(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow printed a traceback, and the message of SQLAlchemy replaced the cause."""
    uri = stores.store(tmp_path)
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        database.execute("CREATE TRIGGER odd BEFORE INSERT ON runs BEGIN INSERT INTO nowhere VALUES (1); END")
    result = pipeline_run.run(stores.project(tmp_path, uri, formats='["pt2"]'))
    assert "OperationalError: no such table: main.nowhere" in str(result.tracking_failure)
    assert "Traceback" not in capfd.readouterr().err


def test_a_read_only_database_is_named_as_the_cause(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "mlflow.db").close()
    reading = f"file:{tmp_path / 'mlflow.db'}?mode=ro"
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: sqlite3.connect(reading, uri=True))
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE runs (id)"))
    except sqlalchemy.exc.OperationalError as error:
        raised = MlflowException(str(error))  # as mlflow does
        raised.__cause__ = error
    text = str(store.failure(raised, "sqlite:///mlflow.db", f"{store.retry_condition(raised)}: again"))
    assert "OperationalError: attempt to write a readonly database\n" in text
    assert "When the folder of the database exists, and this user may write to both: again" in text


def test_an_unknown_run_is_reported_as_another_store(tmp_path: Path) -> None:
    """The hint asked for a fix, although nothing could be fixed."""
    client = store.open_store(stores.store(tmp_path), tmp_path)
    with pytest.raises(MlflowException) as raised:
        client.get_run("0123456789abcdef0123456789abcdef")
    assert store.retry_condition(raised.value).startswith("The run of this bundle may be in another store")


def test_a_row_written_by_another_process_needs_no_fix() -> None:
    """Two copies of a bundle were uploaded at once."""
    raised = MlflowException('(psycopg2.errors.UniqueViolation) duplicate key value violates "model_version_tag_pk"')
    assert store.retry_condition(raised).startswith(
        "Another process uploads this bundle or a copy of it. When that process has"
    )


def test_a_long_retry_after_time_is_not_waited_for(tmp_path: Path) -> None:
    target = bundle(tmp_path)
    start = time.monotonic()
    with answering(503, Retry_After="300") as uri, pytest.raises(TrackingError, match="When the store answers, run"):
        upload_bundle(target, uri)
    assert time.monotonic() - start < 150


def test_an_invalid_host_error_does_not_mention_credentials(tmp_path: Path) -> None:
    body = "Invalid Host header - possible DNS rebinding attack detected"
    hint = r"When the server accepts its host name \(mlflow server --allowed-hosts\), run"
    with answering(403, body) as uri, pytest.raises(TrackingError, match=hint):
        upload_bundle(bundle(tmp_path), uri)


def test_a_refused_request_counts_as_an_answer(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(TrackingError, match=r"state is deleted[^\n]*\n.*When the cause is fixed, run") as caught:
        upload_bundle(bundle(tmp_path), uri, "gone")
    assert "When the store answers" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("pymysql") is not None, reason="the driver is installed")
def test_a_missing_database_driver_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="When the Python package pymysql is installed"):
        upload_bundle(bundle(tmp_path), "mysql+pymysql://localhost/mlflow")


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_named_in_the_hint(tmp_path: Path, status: int) -> None:
    hint = (
        r"When the credentials are correct \(MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
        r"or user and password in the URI\)"
    )
    target = bundle(tmp_path)
    with answering(status) as uri:
        with pytest.raises(TrackingError, match=rf"is complete\. {hint}, run with the same options: optexport upload"):
            upload_bundle(target, uri)
        with pytest.raises(TrackingError, match=rf"The alias did not move\. {hint}, run the command again\."):
            promotion.promote("block", "1", uri)
        (tmp_path / "a config.toml").touch()
        tracker = Tracker(TrackingConfig(uri=uri), tmp_path / "a config.toml", target)
        tracker.start({}, {})
    upload_hint = rf"{hint}, run: optexport upload {target} --config '{tmp_path}/a config\.toml'"
    with pytest.raises(TrackingError, match=upload_hint):
        raise tracker.failure or AssertionError


def test_a_server_with_empty_answers_is_reported_as_not_mlflow(tmp_path: Path) -> None:
    """The error said that the version does not exist."""
    with (
        answering(200, "{}") as uri,
        pytest.raises(TrackingError, match="the server is not an MLflow server") as caught,
    ):
        promotion.promote("block", "1", uri)
    assert caught.value.exit_code == 7


def test_a_new_run_without_an_id_is_an_error() -> None:
    """The bundle stored the empty id and could never be uploaded."""

    class Client:
        def create_run(self, experiment: str, tags: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=""))

    with pytest.raises(ConnectionError, match="it created a run without an id"):
        new_run(Client(), "1", "name", {})
