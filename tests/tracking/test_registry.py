"""Versions, and the alias that moves to the better one, stays, or is moved by hand; with who held it before."""

from __future__ import annotations

import contextlib
import json
import shlex
import sqlite3
from pathlib import Path
from typing import Any

import mlflow
import pytest

from optexport.config.registering import RegisterConfig
from optexport.errors import ConfigError, GateError
from optexport.tracking import by_hand, registry
from optexport.tracking.finished import Finished
from optexport.tracking.later import log_bundle
from optexport.tracking.registry import Registered
from tests import exports, stores
from tests.tracking.bundles import QUIET, bundle, registering, runs, timed

pytestmark = QUIET


class Registry:
    """A store, and what its registry says of the model "block"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = stores.store(folder)
        self.client = mlflow.MlflowClient(self.uri)

    def log(self, size: int = 1000) -> Registered:
        """Sends a bundle whose ONNX file is said to take so many bytes."""
        place = bundle(self.folder, measurements=timed(1.0, 1.1))
        # The bundle itself must be whole to be sent, so the champion's figures are changed where MLflow keeps them.
        return self.send(place, size)

    def send(self, place: Path, size: int) -> Registered:
        exports.edit_json(place / "manifest.json", registering())
        onnx = place / "model.onnx"
        with onnx.open("ab") as file:  # an unknown field of protobuf's, which every reader skips
            file.write(b"\xba\x3e" + _varint(size) + bytes(size))
        exports.reseal(place, "model.onnx")
        logged = log_bundle(place, self.uri)
        assert logged.registered is not None
        return logged.registered

    def send_undecided(self) -> Path:
        """Sends a bundle as if the program had been ended before it was written what became of its version."""
        place = bundle(self.folder)
        version = self.send(place, 1000).version
        for tag in ("optexport.register", "optexport.register.why"):
            self.client.delete_model_version_tag("block", version, tag)
        return place

    @property
    def holder(self) -> str | None:
        held = self.client.get_registered_model("block").aliases.get("champion")
        return None if held is None else str(held)

    @property
    def history(self) -> list[tuple[str, str]]:
        tags = self.client.get_registered_model("block").tags
        return [(entry["version"], entry["by"]) for entry in json.loads(tags["optexport.history.champion"])]

    def tags(self, version: str) -> dict[str, str]:
        return dict(self.client.get_model_version("block", version).tags)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


@pytest.fixture
def store(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def test_the_first_version_gets_the_alias_an_equal_one_takes_it_and_a_worse_one_does_not(store: Registry) -> None:
    first = store.log()
    assert (first.version, first.holder, first.moved, first.failure) == ("1", "1", True, None)
    assert store.holder == "1"
    second = store.log()
    assert (second.version, second.holder, store.holder) == ("2", "2", "2")
    third = store.log(size=100_000)
    assert (third.version, third.holder, third.moved) == ("3", "2", False)
    assert store.holder == "2"
    assert isinstance(third.failure, GateError)
    assert third.failure.exit_code == 6
    assert "block version 3 is registered, and champion is at version 2" in str(third.failure)
    assert "size: onnx takes " in str(third.failure)
    assert "optexport promote block 3 --alias champion" in str(third.failure)
    assert store.tags("3")["optexport.register"] == "stayed"
    assert "size: onnx takes " in store.tags("3")["optexport.register.why"]
    assert store.tags("2")["optexport.register"] == "moved"
    assert store.history == [("1", "ratchet"), ("2", "ratchet")]
    assert len(runs(store.uri)) == 3


def test_a_version_is_its_runs_onnx_model_and_loads_by_its_alias(store: Registry) -> None:
    store.log()
    version = store.client.get_model_version_by_alias("block", "champion")
    (run,) = runs(store.uri)
    assert version.run_id == run.info.run_id
    assert version.source == f"models:/{run.outputs.model_outputs[0].model_id}"
    assert version.tags["optexport.bundle"] == run.data.tags["optexport.bundle"]
    mlflow.set_tracking_uri(store.uri)
    assert "onnx" in mlflow.pyfunc.load_model("models:/block@champion").metadata.flavors


def test_a_champion_that_nothing_is_known_of_keeps_the_alias(store: Registry) -> None:
    store.client.create_registered_model("block")
    other = store.client.create_model_version("block", (store.folder / "model").as_uri())
    store.client.set_registered_model_alias("block", "champion", other.version)
    found = store.log()
    assert (found.version, found.holder, found.moved) == ("2", "1", False)
    assert found.why == (
        "version 1 is of no run of optexport, or of one that was deleted: nothing tells how good it is",
    )
    assert store.tags("2")["optexport.register.why"] == found.why[0]
    assert by_hand.promote(store.uri, "block", "2", "champion") == "1"
    assert by_hand.rollback(store.uri, "block", "champion") == ("2", "1")


def test_what_was_decided_is_not_decided_again(store: Registry) -> None:
    """A bundle that is sent again must not take the alias back from a newer one."""
    place = bundle(store.folder)
    store.send(place, 1000)
    store.log()
    again = log_bundle(place, store.uri).registered
    assert again is not None
    assert (again.version, again.holder, again.moved) == ("1", "2", True)
    assert store.holder == "2"


def test_an_older_version_does_not_take_the_alias_from_a_newer_one(store: Registry) -> None:
    """As of a run that the server was lost to when it was to move the alias, and which is sent again later."""
    store.log()
    place = store.send_undecided()
    store.log()
    late = log_bundle(place, store.uri).registered
    assert late is not None
    assert (late.version, late.holder, late.moved, store.holder) == ("2", "3", False, "3")
    assert late.why == ("version 3 is newer, and holds champion",)
    assert store.tags("2")["optexport.register.why"] == late.why[0]
    assert late.failure is not None
    assert late.failure.exit_code == 6


def test_promoting_and_rolling_back_walk_through_the_history(store: Registry) -> None:
    for _ in range(3):
        store.log()
    assert store.holder == "3"
    assert by_hand.promote(store.uri, "block", "1", "champion") == "3"
    assert store.history[-1] == ("1", "promote")
    assert store.tags("1")["optexport.register.why"] == "by hand"
    assert by_hand.promote(store.uri, "block", "1", "champion") == "1"
    assert by_hand.rollback(store.uri, "block", "champion") == ("1", "3")
    assert "optexport.rolled_back" in store.tags("1")
    assert "optexport.rolled_back" not in store.tags("3")
    assert by_hand.rollback(store.uri, "block", "champion") == ("3", "2")
    assert by_hand.rollback(store.uri, "block", "champion") == ("2", "1")
    with pytest.raises(ConfigError, match="version 1 holds it, and nothing tells of one that did before") as caught:
        by_hand.rollback(store.uri, "block", "champion")
    assert "Versions are 1, 2, 3: optexport promote block VERSION --alias champion" in str(caught.value)
    assert store.holder == "1"


@pytest.mark.parametrize("writes", range(5))
def test_a_promotion_that_was_ended_anywhere_is_completed_by_doing_it_again(store: Registry, writes: int) -> None:
    for _ in range(3):
        store.log()
    store.client.set_model_version_tag("block", "2", "optexport.register", "stayed")
    with contextlib.suppress(KeyboardInterrupt):
        registry.promote(_Ended(store.client, writes), "block", "2", "champion")
    by_hand.promote(store.uri, "block", "2", "champion")
    assert (store.holder, store.tags("2")["optexport.register"]) == ("2", "moved")
    assert store.tags("2")["optexport.register.why"] == "by hand"
    assert by_hand.rollback(store.uri, "block", "champion") == ("2", "3")
    assert by_hand.rollback(store.uri, "block", "champion") == ("3", "2")


@pytest.mark.parametrize("writes", range(5))
def test_a_rollback_that_was_ended_anywhere_goes_back_one_version_by_doing_it_again(
    store: Registry, writes: int
) -> None:
    """Where the alias had moved, and what was left was done again, it went back two."""
    for _ in range(3):
        store.log()
    with pytest.raises(KeyboardInterrupt):
        registry.rollback(_Ended(store.client, writes), "block", "champion")
    assert by_hand.rollback(store.uri, "block", "champion") == ("3", "2")
    assert (store.holder, "optexport.rolled_back" in store.tags("3")) == ("2", True)
    assert by_hand.promote(store.uri, "block", "3", "champion") == "2"
    assert "optexport.rolled_back" not in store.tags("3")
    assert by_hand.rollback(store.uri, "block", "champion") == ("3", "2")
    assert by_hand.rollback(store.uri, "block", "champion") == ("2", "1")


def test_a_rollback_that_was_ended_is_none_any_more_once_the_alias_was_promoted(store: Registry) -> None:
    for _ in range(3):
        store.log()
    with pytest.raises(KeyboardInterrupt):
        registry.rollback(_Ended(store.client, 2), "block", "champion")
    for version in ("1", "2"):
        by_hand.promote(store.uri, "block", version, "champion")
    assert by_hand.rollback(store.uri, "block", "champion") == ("2", "1")


def test_a_bundle_that_is_sent_again_does_not_undo_a_rollback(store: Registry) -> None:
    """Its program was ended after the alias had moved, and before it was written that it had."""
    store.log()
    place = store.send_undecided()
    by_hand.rollback(store.uri, "block", "champion")
    again = log_bundle(place, store.uri).registered
    assert again is not None
    assert (again.version, again.holder, store.holder) == ("2", "1", "1")


class _Ended:
    """A client whose process ends after so many writes."""

    def __init__(self, client: Any, writes: int) -> None:
        self.client, self.left = client, writes

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "delete_")):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
        return getattr(self.client, name)


def test_a_version_that_was_deleted_is_passed_over(store: Registry) -> None:
    for _ in range(3):
        store.log()
    store.client.delete_model_version("block", "2")
    assert by_hand.rollback(store.uri, "block", "champion") == ("3", "1")


def test_what_follows_a_holder_that_is_gone_says_so(store: Registry) -> None:
    store.log()
    store.client.delete_model_version("block", "1")
    second = store.log(size=100_000)
    assert (second.holder, second.moved) == ("2", True)
    assert second.why == ("not compared: version 1, which held champion last, is gone",)
    assert store.tags("2")["optexport.register.why"] == second.why[0]


def test_what_follows_an_alias_that_was_taken_away_says_so(store: Registry) -> None:
    store.log()
    store.client.delete_registered_model_alias("block", "champion")
    second = store.log()
    assert (second.holder, second.moved) == ("2", True)
    assert second.why == ("not compared: champion was taken away from version 1, which held it last",)


def test_a_champion_whose_run_was_deleted_keeps_the_alias(store: Registry) -> None:
    """As MLflow's page deletes it: the run can be restored."""
    store.log()
    run_id = store.client.get_model_version("block", "1").run_id
    store.client.delete_run(run_id)
    found = store.log()
    assert (found.version, found.moved, store.holder) == ("2", False, "1")
    assert "or of one that was deleted" in found.why[0]
    store.client.restore_run(run_id)
    assert store.log().moved


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("manifest.json", "{}", "manifest.json: it does not match its own digest"),
        ("measurements.json", "", "measurements.json: it cannot be read: "),
    ],
)
def test_a_champion_whose_documents_are_damaged_keeps_the_alias(
    store: Registry, name: str, content: str, why: str
) -> None:
    store.log()
    run_id = store.client.get_model_version("block", "1").run_id
    store.client.log_text(run_id, content, f"bundle/{name}")
    found = store.log()
    assert (found.version, found.moved, store.holder) == ("2", False, "1")
    (told,) = found.why
    assert told.startswith(f"version 1 cannot be compared with: {why}")
    assert store.tags("2")["optexport.register.why"] == told


def test_a_champion_whose_figures_cannot_be_computed_with_keeps_the_alias(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: object) -> None:
        raise OverflowError("int too large to convert to float")

    store.log()
    monkeypatch.setattr(registry.ratchet, "compare", compare)
    found = store.log()
    assert (found.version, found.moved, store.holder) == ("2", False, "1")
    assert found.why == ("version 1 cannot be compared with: int too large to convert to float",)


def test_of_equal_entries_the_last_one_is_gone_back_to(store: Registry) -> None:
    """Their times are of seconds."""
    for _ in range(2):
        store.log()
    entries = [{"version": version, "by": "promote", "at": "then"} for version in "12121"]
    store.client.set_registered_model_tag("block", "optexport.history.champion", json.dumps(entries))
    store.client.set_registered_model_alias("block", "champion", "1")
    assert by_hand.rollback(store.uri, "block", "champion") == ("1", "2")
    assert [version for version, _ in store.history] == list("1212")


def test_a_name_in_a_hint_is_written_for_a_shell() -> None:
    found = Registered("it's; mine", "2", "champion", "1", False, ())
    command = str(found.failure).rpartition("To move it all the same: ")[2]
    assert shlex.split(command) == ["optexport", "promote", "it's; mine", "2", "--alias", "champion"]


def test_an_alias_that_others_moved_is_rolled_back_to_what_they_moved_it_from(store: Registry) -> None:
    store.log()
    store.log()
    third = store.log(size=100_000)
    store.client.set_registered_model_alias("block", "champion", third.version)
    assert by_hand.rollback(store.uri, "block", "champion") == ("3", "2")


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [("blok", "1", 'there is no such registered model\n  Did you mean "block"'), ("block", "9", "no such version")],
)
def test_what_is_not_there_cannot_be_promoted(store: Registry, name: str, version: str, words: str) -> None:
    store.log()
    with pytest.raises(ConfigError) as caught:
        by_hand.promote(store.uri, name, version, "champion")
    assert words in str(caught.value)
    assert store.holder == "1"


def test_an_alias_that_nobody_holds_cannot_be_rolled_back(store: Registry) -> None:
    store.log()
    with pytest.raises(ConfigError, match="no version holds it"):
        by_hand.rollback(store.uri, "block", "challenger")


def test_a_champion_that_changes_during_the_comparison_is_compared_with_too(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run moves the alias to a better version while this one is still reading the old champion's figures."""
    store.log(size=100_000)
    store.log(size=1)
    by_hand.promote(store.uri, "block", "1", "champion")
    seen: list[str | None] = []
    compare = registry.ratchet.compare

    def slowly(new: Finished, champion: Finished, allowed: Any) -> Any:
        seen.append(store.holder)
        if len(seen) == 1:
            store.client.set_registered_model_alias("block", "champion", "2")
        return compare(new, champion, allowed)

    monkeypatch.setattr(registry.ratchet, "compare", slowly)
    found = store.log(size=100_000)
    assert seen == ["1", "2"]
    assert (found.version, found.moved, store.holder) == ("3", False, "2")


def test_the_size_of_a_history_is_bounded(store: Registry) -> None:
    store.log()
    entries = [{"version": "1", "by": "promote", "at": "then"}] * 100
    store.client.set_registered_model_tag("block", "optexport.history.champion", json.dumps(entries))
    store.log()
    assert len(store.history) == 100
    assert store.history[-1] == ("2", "ratchet")


def test_a_history_fits_what_postgres_holds_of_a_tag(store: Registry) -> None:
    store.log()
    entries = [{"version": "1", "by": "promote", "at": "2025-01-01T00:00:00+00:00"}] * 100
    registry._write_history(store.client, "block", "champion", entries)
    found = store.client.get_registered_model("block").tags["optexport.history.champion"]
    assert 4900 < len(found) <= 5000
    assert json.loads(found)[-1] == entries[-1]


@pytest.mark.parametrize("tag", ["no JSON", "5", "null", "{}", "[1]", "[{}]", '[{"version": null}]', "[" * 4000])
def test_a_history_that_others_wrote_over_stops_nobody(store: Registry, tag: str) -> None:
    store.log()
    store.client.set_registered_model_tag("block", "optexport.history.champion", tag)
    store.log()
    assert store.history == [("1", "others"), ("2", "ratchet")]
    assert by_hand.rollback(store.uri, "block", "champion") == ("2", "1")


def test_a_champion_whose_run_is_gone_for_good_keeps_the_alias(store: Registry) -> None:
    """As `mlflow gc` leaves it."""
    store.log()
    run_id = store.client.get_model_version("block", "1").run_id
    with contextlib.closing(sqlite3.connect(store.uri.removeprefix("sqlite:///"))) as database, database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [column[1] for column in database.execute(f"PRAGMA table_info({table})")]
            if "run_uuid" in columns:
                database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))
    found = store.log()
    assert (found.version, found.moved, store.holder) == ("2", False, "1")
    assert found.why == (
        "version 1 is of no run of optexport, or of one that was deleted: nothing tells how good it is",
    )


@pytest.mark.parametrize("name", ["it's", "'", "a 'b' c", "50% {x} `y`; --", " \u202eé"])
def test_a_name_of_any_kind_gets_its_second_version(store: Registry, name: str) -> None:
    config = RegisterConfig(name=name)
    versions = []
    for _ in range(2):
        place = bundle(store.folder, manifest=registering(name))
        logged = log_bundle(place, store.uri).registered
        assert logged is not None
        versions.append(logged.version)
    assert versions == ["1", "2"]
    assert by_hand.promote(store.uri, name, "1", config.alias) == "2"
    assert by_hand.rollback(store.uri, name, config.alias) == ("1", "2")


def test_the_defaults_are_those_of_the_config() -> None:
    assert RegisterConfig(name="x").alias == "champion"
