"""Tests of the cache of tuning trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.bundle.outcomes import Comparison, Trial
from optexport.cache import store
from optexport.tuning import trial_cache

CHOSEN = Trial("with freeze", (0,), ("freeze",), comparison=Comparison(1.2, 1.1, 1.3, "faster", None, 20))
MEASURED = Trial("without a", (), (), comparison=Comparison(0.9, 0.8, 0.95, "slower", None, 12))
DROPPED = Trial("without b", (1,), (), comparison=Comparison(0.9, 0.5, 1.5, "inconclusive", 8, 4))
WRONG = Trial("with c", (0,), (), refused="parity failed for onnx: y")
UNLUCKY = Trial("with d", (0,), (), refused="raised OSError: no space left on device")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("cache_folder")
def test_chosen_trial_is_first_and_unfinished_ones_are_omitted() -> None:
    trial_cache.write("name", CHOSEN, [MEASURED, DROPPED, WRONG, UNLUCKY])
    assert trial_cache.read("name") == [CHOSEN, MEASURED, WRONG]
    assert trial_cache.read("another") == []


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("notes", [None, "x", [1], [{"change": "x"}], [{"change": "x", "rules": ["a"], "passes": []}]])
def test_entries_of_other_versions_are_ignored(notes: object) -> None:
    store.write("name", notes)
    assert trial_cache.read("name") == []


def test_nothing_is_cached_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    trial_cache.write("name", CHOSEN, [])
    assert trial_cache.read("name") == []


@pytest.mark.usefixtures("cache_folder")
def test_unwritable_cache_is_ignored(cache_folder: Path) -> None:
    cache_folder.write_text("a file where the folder should be", encoding="utf-8")
    trial_cache.write("name", CHOSEN, [])
    assert trial_cache.read("name") == []
