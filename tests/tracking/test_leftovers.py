"""The run of a bundle that could not be sent to its end: the next run to its output ends it, and nobody else's."""

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
from optexport.tracking.resume import log_bundle
from optexport.tracking.run import REASON_TAG, Tracker
from optexport.tracking.run_lookup import FOLDER_TAG, folder_of
from tests._helpers import stores
from tests.tracking.bundles import QUIET, bundle, runs

pytestmark = QUIET


def left(folder: Path, uri: str) -> tuple[Path, str]:
    """A bundle, and the run that was started for it and never ended."""
    tracker = Tracker(TrackingConfig(uri=uri), folder / "config.toml", folder / "none")
    tracker.start({}, {})
    assert tracker.run_id is not None
    place = bundle(folder, measurements=lambda m: m["origin"].update(mlflow_run=tracker.run_id))
    return place, tracker.run_id


def after_the_next(folder: Path, uri: str, place: Path, left_run: str) -> Run:
    """The run as it is once another one to the bundle's place has begun."""
    following = Tracker(TrackingConfig(uri=uri), folder / "config.toml", place)
    following.start({}, {})
    assert following.failure is None
    assert following.run_id not in (None, left_run)
    return mlflow.MlflowClient(uri).get_run(left_run)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sent", [False, True])
def test_the_next_run_ends_what_was_left_and_log_completes_it_yet(tmp_path: Path, sent: bool) -> None:
    uri = stores.store(tmp_path)
    place, known = left(tmp_path, uri)
    if sent:  # but for its end
        log_bundle(place, uri)
        mlflow.MlflowClient(uri).update_run(known, "RUNNING")
    ended = after_the_next(tmp_path, uri, place, known)
    assert ended.info.status == "FAILED"
    assert ended.data.tags[REASON_TAG] == "it ended before all was sent, and another run to its output began"
    logged = log_bundle(place, uri)
    assert (logged.run_id, logged.before) == (known, False)
    (whole,) = [each for each in runs(uri) if each.info.run_id == known]
    assert whole.info.status == "FINISHED"
    assert REASON_TAG not in whole.data.tags


@pytest.mark.slow
def test_what_is_sent_yet_is_left_alone(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    place, known = left(tmp_path, uri)
    with atomic_dir.locked(place, wait=True):
        assert after_the_next(tmp_path, uri, place, known).info.status == "RUNNING"


@pytest.mark.slow
def test_what_is_sent_from_a_copy_is_left_alone(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    place, known = left(tmp_path, uri)
    copy = Path(shutil.copytree(place, tmp_path / "copy"))
    mlflow.MlflowClient(uri).set_tag(known, FOLDER_TAG, folder_of(copy))
    assert after_the_next(tmp_path, uri, place, known).info.status == "RUNNING"


@pytest.mark.slow
def test_where_nothing_tells_who_sends_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file system knows no locks."""
    uri = stores.store(tmp_path)
    place, known = left(tmp_path, uri)
    monkeypatch.setattr(atomic_dir, "_acquire", lambda path, *, wait: contextlib.ExitStack())
    assert after_the_next(tmp_path, uri, place, known).info.status == "RUNNING"


@pytest.mark.slow
def test_a_run_that_holds_another_bundle_is_left_alone(tmp_path: Path) -> None:
    """Whoever writes a bundle may name any run in it."""
    uri = stores.store(tmp_path)
    other = log_bundle(bundle(tmp_path), uri).run_id
    mlflow.MlflowClient(uri).update_run(other, "RUNNING")
    place = bundle(tmp_path, measurements=lambda m: m["origin"].update(mlflow_run=other))
    assert after_the_next(tmp_path, uri, place, other).info.status == "RUNNING"


@pytest.mark.slow
def test_a_store_that_will_not_tell_of_it_is_no_failure_of_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = stores.store(tmp_path)
    place, known = left(tmp_path, uri)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(run, "run_of", refuse)
    assert after_the_next(tmp_path, uri, place, known).info.status == "RUNNING"
