"""Tests the MLflow run and the bundle after a failure of the export or the store."""

from __future__ import annotations

import contextlib
import importlib.util
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import sqlalchemy
from mlflow.exceptions import MlflowException

from optexport._utils.progress import Progress
from optexport.config.schema import TrackingConfig
from optexport.errors import ParityError, TrackingError
from optexport.parity.verify import verify
from optexport.pipeline import run as pipeline_run
from optexport.tracking import store
from optexport.tracking.registry import promotion
from optexport.tracking.resume import log_bundle
from optexport.tracking.run import Tracker, new_run
from tests._helpers import stores
from tests._helpers.servers import answering
from tests.pipeline.projects import RULES
from tests.tracking.bundles import QUIET, bundle, only_run

pytestmark = QUIET


def test_a_failing_run_is_marked_failed_with_the_reason(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    (tmp_path / "wrong_tracked_rule.py").write_text(RULES)
    config = stores.project(tmp_path, uri, '[[transformations]]\nuse = "python:wrong_tracked_rule:ReluForGelu"')
    with pytest.raises(ParityError) as caught:
        pipeline_run.run(config)
    run = only_run(uri)
    assert run.info.status == "FAILED"
    assert run.data.tags["optexport.failure"] == str(caught.value)
    assert run.data.params["tracking.experiment"] == "tracked"
    assert run.data.metrics == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt, "interrupted"), (MemoryError, "MemoryError")])
def test_an_interrupted_run_is_marked_failed(tmp_path: Path, error: type[BaseException], reason: str) -> None:
    uri = stores.store(tmp_path)

    def announce(name: str, seconds: float | None) -> None:
        if name == "trace":
            raise error

    with pytest.raises(error):
        pipeline_run.run(stores.project(tmp_path, uri), progress=Progress(announce))
    run = only_run(uri)
    assert run.info.status in ("FAILED", "KILLED")
    assert run.data.tags["optexport.failure"] == reason


def test_a_run_interrupted_at_its_creation_is_marked_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id was unknown, so the run stayed RUNNING."""
    uri = stores.store(tmp_path)
    made = mlflow.MlflowClient.create_run

    def interrupted(*args: Any, **options: Any) -> None:
        made(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline_run.run(stores.project(tmp_path, uri))
    run = only_run(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("FAILED", "interrupted")


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
    assert note.startswith("The bundle is whole on disk. What was not sent is sent by: optexport upload ")
    run = only_run(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("FAILED", "interrupted")
    monkeypatch.undo()
    log_bundle(tmp_path / "out" / "block", uri)
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
    assert "The bundle is whole on disk" in str(result.tracking_failure)
    assert all(place.passed for place in verify(result.output).targets)
    assert only_run(uri).info.status == "FAILED"
    (tmp_path / "mlartifacts").unlink()
    assert pipeline_run.run(config).tracking_failure is None


@pytest.mark.slow
def test_an_invalid_store_fails_tracking_but_not_the_export(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, but it is long enough to be read as one" * 20)
    result = pipeline_run.run(stores.project(tmp_path, "sqlite:///mlflow.db", formats='["pt2"]'))
    assert result.tracking_failure is not None
    assert result.run_id is None
    assert all(place.passed for place in verify(result.output).targets)


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
    told = str(store.failure(raised, "sqlite:///mlflow.db", f"{store.when(raised)}: again"))
    assert "OperationalError: attempt to write a readonly database\n" in told
    assert "When its folder is there, and this user may write to both: again" in told


def test_an_unknown_run_is_reported_as_another_store(tmp_path: Path) -> None:
    """The hint asked for a fix, although nothing could be fixed."""
    client = store.open_store(stores.store(tmp_path), tmp_path)
    with pytest.raises(MlflowException) as raised:
        client.get_run("0123456789abcdef0123456789abcdef")
    assert store.when(raised.value).startswith("This store does not know the run that was begun")


def test_a_row_written_by_another_process_needs_no_fix() -> None:
    """Two copies of a bundle were uploaded at once."""
    raised = MlflowException('(psycopg2.errors.UniqueViolation) duplicate key value violates "model_version_tag_pk"')
    assert store.when(raised).startswith("Another process writes the same, as of a copy of this bundle. When it has")


def test_a_long_retry_after_time_is_not_waited_for(tmp_path: Path) -> None:
    place = bundle(tmp_path)
    start = time.monotonic()
    with answering(503, Retry_After="300") as uri, pytest.raises(TrackingError, match="When the store answers, again"):
        log_bundle(place, uri)
    assert time.monotonic() - start < 150


def test_an_invalid_host_error_does_not_mention_credentials(tmp_path: Path) -> None:
    said = "Invalid Host header - possible DNS rebinding attack detected"
    hint = r"When the server has been told of that host \(mlflow server --allowed-hosts\), again"
    with answering(403, said) as uri, pytest.raises(TrackingError, match=hint):
        log_bundle(bundle(tmp_path), uri)


def test_a_refused_request_counts_as_an_answer(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(TrackingError, match=r"state is deleted[^\n]*\n.*When what it says is mended, again") as caught:
        log_bundle(bundle(tmp_path), uri, "gone")
    assert "When the store answers" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("pymysql") is not None, reason="the driver is installed")
def test_a_missing_database_driver_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="When pymysql is installed"):
        log_bundle(bundle(tmp_path), "mysql+pymysql://localhost/mlflow")


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_named_in_the_hint(tmp_path: Path, status: int) -> None:
    hint = (
        r"When the credentials are right \(MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
        r"or user and password in the URI\)"
    )
    place = bundle(tmp_path)
    with answering(status) as uri:
        with pytest.raises(TrackingError, match=rf"on disk\. {hint}, again with the same options: optexport upload"):
            log_bundle(place, uri)
        with pytest.raises(TrackingError, match=rf"The alias stays where it was\. {hint}, do it again\."):
            promotion.promote(uri, "block", "1", "champion")
        tracker = Tracker(TrackingConfig(uri=uri), tmp_path / "a config.toml", place)
        tracker.start({}, {})
    later = rf"{hint}: optexport upload {place} --config '{tmp_path}/a config\.toml'"
    with pytest.raises(TrackingError, match=later):
        raise tracker.failure or AssertionError


def test_a_server_with_empty_answers_is_reported_as_not_mlflow(tmp_path: Path) -> None:
    """The error said that the version does not exist."""
    with answering(200, "{}") as uri, pytest.raises(TrackingError, match="what answers is no MLflow") as caught:
        promotion.promote(uri, "block", "1", "champion")
    assert caught.value.exit_code == 7


def test_a_new_run_without_an_id_is_an_error() -> None:
    """The bundle stored the empty id and could never be uploaded."""

    class Client:
        def create_run(self, experiment: str, tags: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=""))

    with pytest.raises(ConnectionError, match="it made a run that has no id"):
        new_run(Client(), "1", "name", {})
