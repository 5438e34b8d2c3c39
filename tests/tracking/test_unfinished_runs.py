"""Tests that a run ends the unfinished run of the bundle in its output folder, and no other run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run

from optexport._utils import atomic_dir
from optexport.config.schema import TrackingConfig
from optexport.tracking import run
from optexport.tracking.run import REASON_TAG, Tracker
from optexport.tracking.run_lookup import FOLDER_TAG, folder_id
from optexport.tracking.upload import upload_bundle
from tests._helpers import stores
from tests.tracking.bundles import QUIET, bundle, runs

pytestmark = QUIET


def unfinished_bundle(folder: Path, uri: str) -> tuple[Path, str]:
    """Returns a bundle and the id of its unfinished run."""
    tracker = Tracker(TrackingConfig(uri=uri), folder / "config.toml", folder / "none")
    tracker.start({}, {})
    assert tracker.run_id is not None
    target = bundle(folder, measurements=lambda m: m["origin"].update(mlflow_run=tracker.run_id))
    return target, tracker.run_id


def start_next_run(folder: Path, uri: str, target: Path, unfinished_id: str) -> Run:
    """Starts another run in the bundle's folder and returns the unfinished run."""
    following = Tracker(TrackingConfig(uri=uri), folder / "config.toml", target)
    following.start({}, {})
    assert following.failure is None
    assert following.run_id not in (None, unfinished_id)
    return mlflow.MlflowClient(uri).get_run(unfinished_id)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sent", [False, True])
def test_the_next_run_ends_a_leftover_and_upload_completes_it(tmp_path: Path, sent: bool) -> None:
    uri = stores.store(tmp_path)
    target, run_id = unfinished_bundle(tmp_path, uri)
    if sent:  # everything except its end
        upload_bundle(target, uri)
        mlflow.MlflowClient(uri).update_run(run_id, "RUNNING")
    ended = start_next_run(tmp_path, uri, target, run_id)
    assert ended.info.status == "FAILED"
    assert ended.data.tags[REASON_TAG] == "the upload was incomplete when another run to the same output started"
    logged = upload_bundle(target, uri)
    assert (logged.run_id, logged.already_uploaded) == (run_id, False)
    (completed,) = [run for run in runs(uri) if run.info.run_id == run_id]
    assert completed.info.status == "FINISHED"
    assert REASON_TAG not in completed.data.tags


@pytest.mark.slow
def test_a_run_still_uploading_is_not_ended(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    target, run_id = unfinished_bundle(tmp_path, uri)
    with atomic_dir.locked(target, wait=True):
        assert start_next_run(tmp_path, uri, target, run_id).info.status == "RUNNING"


@pytest.mark.slow
def test_a_run_uploading_from_a_copy_is_not_ended(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    target, run_id = unfinished_bundle(tmp_path, uri)
    copy = Path(shutil.copytree(target, tmp_path / "copy"))
    mlflow.MlflowClient(uri).set_tag(run_id, FOLDER_TAG, folder_id(copy))
    assert start_next_run(tmp_path, uri, target, run_id).info.status == "RUNNING"


@pytest.mark.slow
def test_a_run_is_not_ended_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems do not support locks."""
    uri = stores.store(tmp_path)
    target, run_id = unfinished_bundle(tmp_path, uri)
    monkeypatch.setattr(atomic_dir, "_acquire", lambda path, *, wait: contextlib.ExitStack())
    assert start_next_run(tmp_path, uri, target, run_id).info.status == "RUNNING"


@pytest.mark.slow
def test_a_run_of_another_bundle_is_not_ended(tmp_path: Path) -> None:
    """A bundle may name any run as its own."""
    uri = stores.store(tmp_path)
    foreign_id = upload_bundle(bundle(tmp_path), uri).run_id
    mlflow.MlflowClient(uri).update_run(foreign_id, "RUNNING")
    target = bundle(tmp_path, measurements=lambda m: m["origin"].update(mlflow_run=foreign_id))
    assert start_next_run(tmp_path, uri, target, foreign_id).info.status == "RUNNING"


@pytest.mark.slow
def test_a_refused_lookup_does_not_fail_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = stores.store(tmp_path)
    target, run_id = unfinished_bundle(tmp_path, uri)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(run, "find_run", refuse)
    assert start_next_run(tmp_path, uri, target, run_id).info.status == "RUNNING"
