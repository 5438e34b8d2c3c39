"""Restores the tracking URI after each tracking test and fails if a run is still open."""

from __future__ import annotations

from collections.abc import Iterator

import mlflow
import pytest


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = mlflow.get_tracking_uri()
    yield
    left = mlflow.active_run()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)
    assert left is None, "a run was left open"
