"""Tests promotion and rollback of an alias, and its history."""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import optexport
from optexport.cli.main import cli
from optexport.errors import ConfigError, TrackingError
from optexport.tracking.registry import aliases, promotion
from optexport.tracking.registry.registration import Registered
from optexport.tracking.upload import upload_bundle
from tests.tracking.bundles import QUIET
from tests.tracking.registries import Registry

pytestmark = QUIET


@pytest.fixture
def store(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.mark.slow
def test_promotion_and_rollback_follow_the_history(store: Registry) -> None:
    for _ in range(3):
        store.log()
    assert store.holder == "3"
    assert promotion.promote("block", "1", store.uri) == "3"
    assert store.history[-1] == ("1", "promote")
    assert store.tags("1")["optexport.register.why"] == "by hand"
    assert promotion.promote("block", "1", store.uri) == "1"
    assert promotion.rollback("block", store.uri) == ("1", "3")
    assert "optexport.rolled_back" in store.tags("1")
    assert "optexport.rolled_back" not in store.tags("3")
    assert promotion.rollback("block", store.uri) == ("3", "2")
    assert promotion.rollback("block", store.uri) == ("2", "1")
    with pytest.raises(ConfigError, match="no version that held the alias before version 1") as caught:
        promotion.rollback("block", store.uri)
    assert "Choose one of the versions 1, 2, 3: optexport promote block VERSION --alias champion" in str(caught.value)
    assert store.holder == "1"


@pytest.mark.slow
def test_python_moves_the_alias_in_the_store_of_the_environment(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        store.log()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    assert optexport.promote("block", 1) == "2"
    assert optexport.rollback("block") == ("1", "2")
    assert optexport.promote("block", "1", alias="candidate") is None
    assert store.holder == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alias": "latest"}, 'alias: "latest" is not a valid alias'),
        ({"uri": "htp://host"}, 'uri: MLflow has no tracking store "htp"'),
        ({}, "uri: no MLflow store is set"),
        ({"uri": 5}, "uri: 5 is not a text"),
        ({"alias": 5}, "alias: 5 is not a text"),
    ],
)
def test_python_names_the_wrong_argument(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for call in (
        lambda: optexport.promote("block", "1", **arguments),
        lambda: optexport.rollback("block", **arguments),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert str(raised.value).startswith(message)


def test_a_missing_database_is_reported_and_not_created(tmp_path: Path) -> None:
    """The database was created, and the error was about a missing model."""
    uri = f"sqlite:///{tmp_path / 'typo.db'}"
    for ask in (
        lambda: promotion.promote("block", "1", uri),
        lambda: promotion.rollback("block", uri),
    ):
        with pytest.raises(ConfigError, match="the database does not exist"):
            ask()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("writes", range(6))
def test_repeating_an_interrupted_promotion_completes_it(store: Registry, writes: int) -> None:
    for _ in range(3):
        store.log()
    store.client.set_model_version_tag("block", "2", "optexport.register", "stayed")
    with contextlib.suppress(KeyboardInterrupt):
        promotion.promote_version(_Ended(store.client, writes), "block", "2", "champion")
    promotion.promote("block", "2", store.uri)
    assert (store.holder, store.tags("2")["optexport.register"]) == ("2", "moved")
    assert store.tags("2")["optexport.register.why"] == "by hand"
    assert promotion.rollback("block", store.uri) == ("2", "3")
    assert promotion.rollback("block", store.uri) == ("3", "2")


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("writes", range(5))
def test_repeating_an_interrupted_rollback_goes_back_one_version(store: Registry, writes: int) -> None:
    """The repeated rollback went back two versions if the alias had already moved."""
    for _ in range(3):
        store.log()
    with pytest.raises(KeyboardInterrupt):
        ended = _Ended(store.client, writes)
        promotion.roll_back_version(ended, "block", "champion")
        aliases.end_rollback(ended, "block", "champion")
    assert promotion.rollback("block", store.uri) == ("3", "2")
    assert (store.holder, "optexport.rolled_back" in store.tags("3")) == ("2", True)
    assert promotion.promote("block", "3", store.uri) == "2"
    assert "optexport.rolled_back" not in store.tags("3")
    assert promotion.rollback("block", store.uri) == ("3", "2")
    assert promotion.rollback("block", store.uri) == ("2", "1")


@pytest.mark.slow
def test_a_promotion_cancels_an_interrupted_rollback(store: Registry) -> None:
    for _ in range(3):
        store.log()
    with pytest.raises(KeyboardInterrupt):
        promotion.roll_back_version(_Ended(store.client, 2), "block", "champion")
    for version in ("1", "2"):
        promotion.promote("block", version, store.uri)
    assert promotion.rollback("block", store.uri) == ("2", "1")


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConnectionError("lost")])
def test_a_rollback_with_a_lost_answer_names_the_next_command(
    store: Registry, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The rollback was complete, so repeating it went back another version."""
    for _ in range(3):
        store.log()

    def lost(*arguments: Any) -> None:
        end_rollback(*arguments)
        raise error

    end_rollback = aliases.end_rollback
    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, TrackingError)) as caught:
        patched.setattr(aliases, "end_rollback", lost)
        promotion.rollback("block", store.uri)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "Version 2 holds champion." in text
    text, _, command = text.partition("run this command, not another rollback:\n")
    result = CliRunner().invoke(cli, shlex.split(command.strip().splitlines()[0])[1:])
    assert result.exit_code == 0, result.output
    assert store.holder == "2"
    assert promotion.rollback("block", store.uri) == ("2", "1")


@pytest.mark.slow
def test_a_rollback_ignores_an_interrupted_promotion(store: Registry) -> None:
    """No version held the alias, but its history recorded a move."""
    for _ in range(2):
        store.log()
    store.client.delete_registered_model_alias("block", "champion")
    store.client.delete_registered_model_tag("block", "optexport.history.champion")
    with pytest.raises(KeyboardInterrupt):
        promotion.promote_version(_Ended(store.client, 1), "block", "1", "champion")
    promotion.promote("block", "2", store.uri)
    assert store.history == [("2", "promote")]
    with pytest.raises(ConfigError, match="no version that held the alias before version 2"):
        promotion.rollback("block", store.uri)


@pytest.mark.slow
def test_a_version_with_the_alias_again_loses_the_rollback_tag(store: Registry) -> None:
    for _ in range(3):
        store.log()
    for version in ("2", "3"):
        promotion.promote("block", version, store.uri)
    assert promotion.rollback("block", store.uri) == ("3", "2")
    assert promotion.rollback("block", store.uri) == ("2", "3")
    assert "optexport.rolled_back" in store.tags("2")
    assert "optexport.rolled_back" not in store.tags("3")


@pytest.mark.slow
def test_promoting_the_holder_ends_an_interrupted_rollback(store: Registry) -> None:
    """The interrupted rollback made a later one report success without an effect."""
    for _ in range(3):
        store.log()
    promotion.roll_back_version(store.client, "block", "champion")  # up to its last write
    promotion.promote("block", "2", store.uri)
    assert promotion.rollback("block", store.uri) == ("2", "1")


@pytest.mark.slow
def test_the_reason_for_no_comparison_survives_an_interruption(
    store: Registry,
) -> None:
    store.log()
    store.client.delete_model_version("block", "1")
    target = store.send_undecided()
    reason = "not compared: version 1, the last holder of champion, was deleted"
    store.client.set_model_version_tag("block", "2", "optexport.register.why", reason)  # the reason is recorded first
    again = upload_bundle(target, store.uri).registered
    assert again is not None
    assert (again.holder, again.why, store.tags("2")["optexport.register.why"]) == ("2", (reason,), reason)


@pytest.mark.slow
def test_uploading_a_bundle_again_does_not_undo_a_promotion(store: Registry) -> None:
    """The first upload stopped after moving the alias and before recording the move."""
    store.log()
    target = store.send_undecided()
    promotion.promote("block", "1", store.uri)
    again = upload_bundle(target, store.uri).registered
    assert again is not None
    assert (again.version, again.holder, store.holder) == ("2", "1", "1")
    assert store.tags("2")["optexport.register"] == "moved"


@pytest.mark.slow
def test_uploading_a_bundle_again_does_not_undo_a_rollback(store: Registry) -> None:
    """The first upload stopped after moving the alias and before recording the move."""
    store.log()
    target = store.send_undecided()
    promotion.rollback("block", store.uri)
    again = upload_bundle(target, store.uri).registered
    assert again is not None
    assert (again.version, again.holder, store.holder) == ("2", "1", "1")


class _Ended:
    """A client that is interrupted after a number of writes."""

    def __init__(self, client: Any, writes: int) -> None:
        self.client, self.left = client, writes

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "delete_")):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
        return getattr(self.client, name)


@pytest.mark.slow
def test_a_rollback_skips_a_deleted_version(store: Registry) -> None:
    for _ in range(3):
        store.log()
    store.client.delete_model_version("block", "2")
    assert promotion.rollback("block", store.uri) == ("3", "1")


@pytest.mark.slow
def test_a_rollback_uses_the_last_of_equal_history_entries(store: Registry) -> None:
    """Entries record their time in whole seconds."""
    for _ in range(2):
        store.log()
    entries = [{"version": version, "by": "promote", "at": "then"} for version in "12121"]
    store.client.set_registered_model_tag("block", "optexport.history.champion", json.dumps(entries))
    store.client.set_registered_model_alias("block", "champion", "1")
    assert promotion.rollback("block", store.uri) == ("1", "2")
    assert [version for version, _ in store.history] == list("1212")


def test_names_in_hints_are_quoted_for_a_shell() -> None:
    registered = Registered("it's; mine", "2", "champion", "1", False, (), "sqlite:///a b.db")
    command = str(registered.failure).rpartition("To move the alias anyway, run: ")[2]
    expected = ["optexport", "promote", "it's; mine", "2", "--alias", "champion"]
    assert shlex.split(command) == [*expected, "--uri", "sqlite:///a b.db"]
    dashed = str(replace(registered, name="-m").failure).rpartition("To move the alias anyway, run: ")[2]
    assert shlex.split(dashed)[-3:] == ["--", "-m", "2"]
    secret = replace(registered, uri="https://me:secret@mlflow")
    assert shlex.split(str(secret.failure).rpartition("To move the alias anyway, run: ")[2]) == [
        *expected,
        "--uri",
        "URI",
    ]


@pytest.mark.slow
def test_a_rollback_undoes_a_move_by_another_program(store: Registry) -> None:
    store.log()
    store.log()
    third = store.log(size=100_000)
    store.client.set_registered_model_alias("block", "champion", third.version)
    assert promotion.rollback("block", store.uri) == ("3", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("blok", "1", 'unknown registered model\nHint: Did you mean "block"'),
        ("block", "9", "unknown version"),
        ("", "1", 'name: "" is not a valid name of a registered model'),
        ("block/1", "1", 'name: "block/1" is not a valid name of a registered model'),
    ],
)
def test_a_missing_model_or_version_cannot_be_promoted(store: Registry, name: str, version: str, words: str) -> None:
    store.log()
    with pytest.raises(ConfigError) as caught:
        promotion.promote(name, version, store.uri)
    assert words in str(caught.value)
    assert store.holder == "1"


@pytest.mark.slow
def test_an_unassigned_alias_cannot_be_rolled_back(store: Registry) -> None:
    store.log()
    with pytest.raises(ConfigError, match="no version holds the alias"):
        promotion.rollback("block", store.uri, alias="challenger")


@pytest.mark.slow
def test_the_size_of_a_history_is_bounded(store: Registry) -> None:
    store.log()
    entries = [{"version": "1", "by": "promote", "at": "then"}] * 100
    store.client.set_registered_model_tag("block", "optexport.history.champion", json.dumps(entries))
    store.log()
    assert len(store.history) == 100
    assert store.history[-1] == ("2", "run")


@pytest.mark.slow
def test_a_history_fits_into_a_postgres_tag(store: Registry) -> None:
    store.log()
    entries = [{"version": "1", "by": "promote", "at": "2025-01-01T00:00:00+00:00"}] * 100
    aliases.write_history(store.client, "block", "champion", entries)
    tag = store.client.get_registered_model("block").tags["optexport.history.champion"]
    assert 4900 < len(tag) <= 5000
    assert json.loads(tag)[-1] == entries[-1]


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("tag", ["no JSON", "5", "null", "{}", "[1]", "[{}]", '[{"version": null}]', "[" * 4000])
def test_an_overwritten_history_does_not_stop_a_registration(store: Registry, tag: str) -> None:
    store.log()
    store.client.set_registered_model_tag("block", "optexport.history.champion", tag)
    store.log()
    assert store.history == [("1", "others"), ("2", "run")]
    assert promotion.rollback("block", store.uri) == ("2", "1")
