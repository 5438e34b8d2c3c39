"""What is kept of a search: what need not be tried again, and nothing that could not be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexport.bench.comparison import Comparison
from optexport.cache import store
from optexport.tuning import trial_cache
from optexport.tuning.outcome import Trial

CHOSEN = Trial("with freeze", (0,), ("freeze",), comparison=Comparison(1.2, 1.1, 1.3, "faster", None, 20))
ENDED = Trial("without a", (), (), comparison=Comparison(0.9, 0.8, 0.95, "slower", None, 12))
DROPPED = Trial("without b", (1,), (), comparison=Comparison(0.9, 0.5, 1.5, "cannot tell", 8, 4))
WRONG = Trial("with c", (0,), (), refused="not the same at onnx: y")
UNLUCKY = Trial("with d", (0,), (), refused="it raised OSError: no space left on device")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("place")
def test_what_was_chosen_comes_first_and_what_may_fare_better_another_time_is_not_kept() -> None:
    trial_cache.write("name", CHOSEN, [ENDED, DROPPED, WRONG, UNLUCKY])
    assert trial_cache.read("name") == [CHOSEN, ENDED, WRONG]
    assert trial_cache.read("another") == []


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("notes", [None, "x", [1], [{"change": "x"}], [{"change": "x", "rules": ["a"], "passes": []}]])
def test_what_another_version_kept_is_none(notes: object) -> None:
    store.write("name", notes)
    assert trial_cache.read("name") == []


def test_without_a_place_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    trial_cache.write("name", CHOSEN, [])
    assert trial_cache.read("name") == []


@pytest.mark.usefixtures("place")
def test_where_nothing_can_be_written_the_search_goes_on(place: Path) -> None:
    place.write_text("a file where the folder should be", encoding="utf-8")
    trial_cache.write("name", CHOSEN, [])
    assert trial_cache.read("name") == []
