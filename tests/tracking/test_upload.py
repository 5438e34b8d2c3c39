"""Tests uploads: verified files only, each once, by one process at a time."""

from __future__ import annotations

import signal
import sys
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner

from optexport._utils import atomic_dir
from optexport._utils.progress import Progress
from optexport.bundle.layout import check_replaceable
from optexport.cli.main import cli
from optexport.errors import BundleError, ConfigError, TrackingError
from optexport.pipeline import run
from optexport.tracking import run as tracking_run
from optexport.tracking import store, upload, upload_check
from optexport.tracking.upload import Uploaded, upload_bundle
from tests._helpers import exports, stores
from tests._utils.test_signals import sends_first
from tests.tracking.bundles import QUIET, bundle, only_run, registering, runs

pytestmark = QUIET


def registered_project(folder: Path, uri: str) -> Path:
    config = stores.project(folder, uri, formats='["onnx"]')
    config.write_text(f'{config.read_text()}[register]\nname = "block"\n')
    return config


@pytest.mark.slow
def test_a_bundle_is_locked_while_its_run_uploads_it(tmp_path: Path) -> None:
    uri, output = stores.store(tmp_path), tmp_path / "out" / "block"
    logged: list[Future[Uploaded]] = []
    errors = []

    def announce(name: str, seconds: float | None) -> None:
        if name != "track":
            return
        if seconds is None:
            logged.append(pool.submit(upload_bundle, output, uri, "tracked"))
            time.sleep(0.5)
        assert not logged[0].done()
        with pytest.raises(ConfigError) as caught, atomic_dir.drafting(output, check_replaceable):
            pass
        errors.append(str(caught.value))

    with ThreadPoolExecutor(1) as pool:
        result = run.run(registered_project(tmp_path, uri), progress=Progress(announce))
        upload = logged[0].result(60)
    assert result.failure is None
    assert len(errors) == 2
    assert all("the bundle in this folder is being uploaded to MLflow" in error for error in errors)
    assert (upload.run_id, upload.already_uploaded) == (result.run_id, True)
    client = mlflow.MlflowClient(uri)
    assert len(client.search_logged_models([only_run(uri).info.experiment_id])) == 1
    assert len(client.search_model_versions("name = 'block'")) == 1


@pytest.mark.slow
def test_an_upload_of_a_model_part_waits_for_the_model_lock(tmp_path: Path) -> None:
    """A run replaces all parts of a model together."""
    uri, model = stores.store(tmp_path), tmp_path / "model"
    model.mkdir()
    (model / "generation.json").touch()
    part = bundle(model).rename(model / "decoder")
    with ThreadPoolExecutor(1) as pool:
        with atomic_dir.locked(model, wait=True):
            logged = pool.submit(upload_bundle, part, uri)
            time.sleep(0.5)
            assert not logged.done()
        assert not logged.result(60).already_uploaded


@pytest.mark.slow
def test_a_run_does_not_upload_the_bundle_of_another_run(tmp_path: Path) -> None:
    """Some file systems do not support locks."""
    uri = stores.store(tmp_path)

    def announce(name: str, seconds: float | None) -> None:
        if name == "track" and seconds is None:
            measured = tmp_path / "out" / "block" / "measurements.json"
            exports.edit_json(measured, lambda document: document["origin"].update(mlflow_run="0" * 32))

    result = run.run(registered_project(tmp_path, uri), progress=Progress(announce))
    assert "another run has replaced the bundle of this run" in str(result.tracking_failure)
    assert only_run(uri).info.status == "FAILED"
    assert mlflow.MlflowClient(uri).search_registered_models() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["model.onnx", "graph_after.txt"])
def test_a_file_changed_during_the_upload_is_not_registered(tmp_path: Path, name: str) -> None:
    uri = stores.store(tmp_path)

    def announce(stage: str, seconds: float | None) -> None:
        if stage == "track" and seconds is None:
            with (tmp_path / "out" / "block" / name).open("ab") as file:
                file.write(b"\xba\x3e\x01 ")  # an unknown protobuf field, which readers skip

    result = run.run(registered_project(tmp_path, uri), progress=Progress(announce))
    assert f"{name}: the file was changed after the bundle was written" in str(result.tracking_failure)
    assert only_run(uri).info.status == "FAILED"
    assert mlflow.MlflowClient(uri).search_registered_models() == []
    with pytest.raises(BundleError):
        upload_bundle(result.output, uri, "tracked")


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_upload_ends_as_killed_and_can_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(upload, "send_bundle", sends_first(upload.send_bundle, sent))
        ended = CliRunner().invoke(cli, ["upload", str(target), "--uri", uri])
    assert ended.exit_code == code
    assert "Error: interrupted\nHint: The bundle on disk is complete. Run the same command again" in ended.stderr
    (run,) = runs(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("KILLED", "interrupted")
    again = upload_bundle(target, uri)
    assert (again.run_id, again.already_uploaded) == (run.info.run_id, False)
    (run,) = runs(uri)
    assert run.info.status == "FINISHED"
    assert "optexport.failure" not in run.data.tags


@pytest.mark.slow
def test_a_run_interrupted_while_uploading_leaves_a_whole_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri, formats='["pt2"]')
    with monkeypatch.context() as patched:
        patched.setattr(tracking_run, "send_bundle", sends_first(tracking_run.send_bundle, signal.SIGTERM))
        ended = CliRunner().invoke(cli, ["run", str(config)])
    assert ended.exit_code == 143
    target = tmp_path / "out" / "block"
    note = f"Hint: The bundle on disk is complete. To upload it, run: optexport upload {target} --config {config}\n"
    assert ended.stderr.endswith(f"Error: interrupted\n{note}")
    run = only_run(uri)
    assert (run.info.status, run.data.tags["optexport.failure"]) == ("KILLED", "interrupted")
    assert upload_bundle(target, uri, "tracked").run_id == run.info.run_id
    assert only_run(uri).info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize("creates", ["create_model_version", "create_logged_model"])
def test_a_late_result_of_an_earlier_request_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, creates: str
) -> None:
    """The server completes an earlier request after the lookup and before the next request."""
    uri, target = stores.store(tmp_path), bundle(tmp_path, manifest=registering())
    real = getattr(mlflow.MlflowClient, creates)
    objects: list[Any] = []

    def twice(*arguments: Any, **options: Any) -> Any:
        objects.append(real(*arguments, **options))
        time.sleep(0.01)
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(mlflow.MlflowClient, creates, twice)
        logged = upload_bundle(target, uri)
    assert len(objects) == 1
    (run,) = runs(uri)
    client = mlflow.MlflowClient(uri)
    (model,) = client.search_logged_models([run.info.experiment_id])
    (version,) = client.search_model_versions("name = 'block'")
    assert (version.run_id, version.version, version.source) == (logged.run_id, 1, f"models:/{model.model_id}")
    assert client.get_registered_model("block").aliases == {"champion": version.version}
    if creates == "create_logged_model":
        assert model.model_id == objects[0].model_id


@pytest.mark.slow
def test_missing_files_are_reported_and_uploaded_later(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    logged = upload_bundle(target, uri)
    client = mlflow.MlflowClient(uri)

    def check() -> None:
        upload_check.check_upload(lambda path: client.list_artifacts(logged.run_id, path), target, "bundle")

    check()
    stored = Path(client.get_run(logged.run_id).info.artifact_uri.removeprefix("file://")) / "bundle"
    (stored / "model.onnx").unlink()
    (stored / "graph_after.txt").write_text("short")
    size = (target / "graph_after.txt").stat().st_size
    with pytest.raises(TrackingError) as caught:
        check()
    problems = f"bundle/graph_after.txt: expected {size} bytes, found 5; bundle/model.onnx is missing"
    assert str(caught.value) == f"the store accepted the upload but does not have all files: {problems}"
    client.update_run(logged.run_id, "FAILED")
    upload_bundle(target, uri)
    check()


def test_each_database_driver_gets_its_own_timeout_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow supports pg8000, which has no `connect_timeout` option."""
    connections = []

    class Refusing(types.ModuleType):
        __version__, paramstyle = "1.31.6", "format"
        Error = DatabaseError = OperationalError = InterfaceError = ConnectionError

        def connect(self, **options: Any) -> None:
            connections.append(options)
            raise ConnectionError

    monkeypatch.setitem(sys.modules, "pg8000", Refusing("pg8000"))
    with pytest.raises(Exception, match=r"ConnectionError|^$"):
        store._check_database("postgresql+pg8000://someone@127.0.0.1/there")
    assert connections[0]["timeout"] == 5
    assert "connect_timeout" not in connections[0]
