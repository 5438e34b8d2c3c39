"""Tests of how the threads of a command wait for each other."""

from __future__ import annotations

import os

import pytest

from optexport.cli.main import limit_spinning


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_waiting_threads_sleep_early_unless_the_user_decides(
    settings: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(settings))
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
