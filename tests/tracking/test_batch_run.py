"""Tests that the MLflow run of a batch ends in every case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow
import pytest

from optexport.config.schema import TrackingConfig
from optexport.tracking.batch import batch_run
from optexport.tracking.run import REASON_TAG
from tests._helpers import stores
from tests.tracking.bundles import QUIET, runs

pytestmark = QUIET


class _Interrupted(Mapping[str, Any]):
    """Metrics whose upload is interrupted."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise KeyboardInterrupt


def test_an_interrupt_during_the_upload_of_results_ends_the_run_as_killed(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    with (
        pytest.raises(KeyboardInterrupt),
        batch_run(TrackingConfig(uri=uri), tmp_path / "config.toml", 1) as run,
    ):
        run.metrics = _Interrupted()
    (ended,) = runs(uri)
    assert ended.info.status == "KILLED"


def test_an_interrupt_right_after_the_start_ends_the_run_as_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = stores.store(tmp_path)

    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow.MlflowClient, "log_param", interrupt)
    with (
        pytest.raises(KeyboardInterrupt),
        batch_run(TrackingConfig(uri=uri), tmp_path / "config.toml", 1),
    ):
        pytest.fail("the batch started")
    (ended,) = runs(uri)
    assert ended.info.status == "KILLED"


def test_a_failed_upload_of_results_ends_the_run_as_failed_with_the_reason(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    with batch_run(TrackingConfig(uri=uri), tmp_path / "config.toml", 1) as run:
        run.metrics = {"configs": "many"}  # type: ignore[dict-item]
    (ended,) = runs(uri)
    assert run.failure is not None
    assert (ended.info.status, ended.data.tags[REASON_TAG]) == ("FAILED", run.failure.message)
