"""Tests registered versions and the decision to move the alias."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities.model_registry import RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from optexport.config.registration import RegisterConfig
from optexport.errors import GateError, TrackingError
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.registry import aliases, promotion
from optexport.tracking.registry import registration as registry
from optexport.tracking.upload import upload_bundle
from tests.tracking.bundles import QUIET, bundle, registering, runs
from tests.tracking.registries import Registry

pytestmark = QUIET


@pytest.fixture
def store(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.mark.slow
def test_the_alias_moves_to_an_equal_version_but_not_a_worse_one(store: Registry) -> None:
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
    assert "size: onnx has " in str(third.failure)
    assert "optexport promote block 3 --alias champion" in str(third.failure)
    assert store.tags("3")["optexport.register"] == "stayed"
    assert "size: onnx has " in store.tags("3")["optexport.register.why"]
    assert store.tags("2")["optexport.register"] == "moved"
    assert store.history == [("1", "run"), ("2", "run")]
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


def test_a_champion_without_an_optexport_run_keeps_the_alias(store: Registry) -> None:
    store.client.create_registered_model("block")
    foreign = store.client.create_model_version("block", (store.folder / "model").as_uri())
    store.client.set_registered_model_alias("block", "champion", foreign.version)
    registered = store.log()
    assert (registered.version, registered.holder, registered.moved) == ("2", "1", False)
    assert registered.why == ("version 1 cannot be compared: its run was deleted or was not made by optexport",)
    assert store.tags("2")["optexport.register.why"] == registered.why[0]
    assert promotion.promote("block", "2", store.uri) == "1"
    assert promotion.rollback("block", store.uri) == ("2", "1")


@pytest.mark.slow
def test_a_registration_is_decided_only_once(store: Registry) -> None:
    """A bundle that is uploaded again must not take the alias from a newer one."""
    target = bundle(store.folder)
    store.send(target, 1000)
    store.log()
    again = upload_bundle(target, store.uri).registered
    assert again is not None
    assert (again.version, again.holder, again.moved) == ("1", "2", True)
    assert store.holder == "2"


@pytest.mark.slow
def test_an_older_version_does_not_take_the_alias_of_a_newer_one(store: Registry) -> None:
    """The server was lost before the alias moved, and the bundle is uploaded again later."""
    store.log()
    target = store.send_undecided()
    store.log()
    late = upload_bundle(target, store.uri).registered
    assert late is not None
    assert (late.version, late.holder, late.moved, store.holder) == ("2", "3", False, "3")
    assert late.why == ("version 3 is newer and holds champion",)
    assert store.tags("2")["optexport.register.why"] == late.why[0]
    assert late.failure is not None
    assert late.failure.exit_code == 6


@pytest.mark.slow
def test_a_version_after_a_deleted_champion_gives_the_reason(store: Registry) -> None:
    store.log()
    store.client.delete_model_version("block", "1")
    second = store.log(size=100_000)
    assert (second.holder, second.moved) == ("2", True)
    assert second.why == ("not compared: version 1, the last holder of champion, was deleted",)
    assert store.tags("2")["optexport.register.why"] == second.why[0]


@pytest.mark.slow
def test_a_version_after_a_removed_alias_gives_the_reason(store: Registry) -> None:
    store.log()
    store.client.delete_registered_model_alias("block", "champion")
    second = store.log()
    assert (second.holder, second.moved) == ("2", True)
    assert second.why == ("not compared: champion was removed from version 1, its last holder",)


@pytest.mark.slow
def test_a_champion_with_a_deleted_run_keeps_the_alias(store: Registry) -> None:
    """The MLflow page only marks a run as deleted, so it can be restored."""
    store.log()
    run_id = store.client.get_model_version("block", "1").run_id
    store.client.delete_run(run_id)
    registered = store.log()
    assert (registered.version, registered.moved, store.holder) == ("2", False, "1")
    assert "its run was deleted" in registered.why[0]
    store.client.restore_run(run_id)
    assert store.log().moved


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("manifest.json", "{}", "manifest.json: the content does not match its own digest"),
        ("measurements.json", "", "measurements.json: the file cannot be read: "),
    ],
)
def test_a_champion_with_damaged_documents_keeps_the_alias(
    store: Registry, name: str, content: str, problem: str
) -> None:
    store.log()
    run_id = store.client.get_model_version("block", "1").run_id
    store.client.log_text(run_id, content, f"bundle/{name}")
    registered = store.log()
    assert (registered.version, registered.moved, store.holder) == ("2", False, "1")
    (reason,) = registered.why
    assert reason.startswith(f"version 1 cannot be compared: {problem}")
    assert store.tags("2")["optexport.register.why"] == reason


def test_a_champion_with_unusable_figures_keeps_the_alias(store: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: object) -> None:
        raise OverflowError("int too large to convert to float")

    store.log()
    monkeypatch.setattr(registry.regression_gate, "compare", compare)
    registered = store.log()
    assert (registered.version, registered.moved, store.holder) == ("2", False, "1")
    assert registered.why == ("version 1 cannot be compared: int too large to convert to float",)


@pytest.mark.slow
def test_a_champion_promoted_during_comparison_is_compared_too(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run moves the alias to a better version while the old champion is compared."""
    store.log(size=100_000)
    store.log(size=1)
    promotion.promote("block", "1", store.uri)
    holders: list[str | None] = []
    compare = registry.regression_gate.compare

    def slowly(new: BundleRecord, champion: BundleRecord, allowed: Any) -> Any:
        holders.append(store.holder)
        if len(holders) == 1:
            store.client.set_registered_model_alias("block", "champion", "2")
        return compare(new, champion, allowed)

    monkeypatch.setattr(registry.regression_gate, "compare", slowly)
    registered = store.log(size=100_000)
    assert holders == ["1", "2"]
    assert (registered.version, registered.moved, store.holder) == ("3", False, "2")


@pytest.mark.slow
def test_a_champion_with_a_purged_run_keeps_the_alias(store: Registry) -> None:
    """`mlflow gc` purges deleted runs."""
    store.log()
    run_id = store.client.get_model_version("block", "1").run_id
    with contextlib.closing(sqlite3.connect(store.uri.removeprefix("sqlite:///"))) as database, database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [column[1] for column in database.execute(f"PRAGMA table_info({table})")]
            if "run_uuid" in columns:
                database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))
    registered = store.log()
    assert (registered.version, registered.moved, store.holder) == ("2", False, "1")
    assert registered.why == ("version 1 cannot be compared: its run was deleted or was not made by optexport",)


@pytest.mark.slow
def test_a_lost_server_is_not_reported_as_a_wrong_path(store: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    store.log()
    error = ConnectionError("the server is gone")

    def lost(*args: Any) -> None:
        monkeypatch.setattr(mlflow.MlflowClient, "get_run", lambda *_: (_ for _ in ()).throw(error))
        raise MlflowException("please ensure that the path is correct", error_code=RESOURCE_DOES_NOT_EXIST)

    monkeypatch.setattr(mlflow.MlflowClient, "download_artifacts", lost)
    with pytest.raises(TrackingError, match="the server is gone"):
        store.log()


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("name", ["it's", "'", "a 'b' c", "50% {x} `y`; --", " \u202eé"])
def test_any_model_name_can_get_a_second_version(store: Registry, name: str) -> None:
    config = RegisterConfig(name=name)
    versions = []
    for _ in range(2):
        target = bundle(store.folder, manifest=registering(name))
        logged = upload_bundle(target, store.uri).registered
        assert logged is not None
        versions.append(logged.version)
    assert versions == ["1", "2"]
    assert promotion.promote(name, "1", store.uri, alias=config.alias) == "2"
    assert promotion.rollback(name, store.uri, alias=config.alias) == ("1", "2")


def test_the_default_alias_is_champion() -> None:
    assert RegisterConfig(name="x").alias == "champion"


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("empty", [1, 2, 4, 6, 7, 9, 10])  # MLflow makes the other calls itself
def test_an_empty_answer_loses_no_history(empty: int, store: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version took the alias, and the history lost its previous holder."""
    store.log()
    real, names = mlflow.MlflowClient.get_registered_model, []

    def get(client: mlflow.MlflowClient, name: str) -> Any:
        names.append(name)
        return RegisteredModel("") if len(names) == empty else real(client, name)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "get_registered_model", get)
        with pytest.raises(TrackingError, match="the server is not an MLflow server"):
            store.log()
    assert len(names) == empty
    assert store.history[0] == ("1", "run")
    assert store.holder == ("1" if empty < 8 else "2")  # the alias moves at the eighth call


@pytest.mark.slow
@pytest.mark.parametrize("by", ["register", "promote", "rollback"])
def test_an_alias_that_did_not_move_is_an_error(by: str, store: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may answer for the server, so the command reported a move that did not happen."""
    store.log()
    store.log()
    act = {
        "register": store.log,
        "promote": lambda: promotion.promote("block", "1", store.uri),
        "rollback": lambda: promotion.rollback("block", store.uri),
    }[by]
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "set_registered_model_alias", lambda *_: None)
        with pytest.raises(TrackingError, match="champion moved to version ., but the alias is still at version 2"):
            act()
    assert store.holder == "2"
    act()
    assert store.holder == ("4" if by == "register" else "1")


@pytest.mark.slow
def test_a_champion_promoted_right_before_the_move_is_compared(
    store: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worse of two simultaneous versions got the alias, and the history contained only one."""
    store.log()
    real = aliases.end_rollback

    def better_comes(client: Any, name: str, alias: str) -> None:
        monkeypatch.setattr(aliases, "end_rollback", real)
        store.log(size=10)
        real(client, name, alias)

    monkeypatch.setattr(aliases, "end_rollback", better_comes)
    late = store.log(size=1000)
    assert late.version == "2"
    assert store.holder == "3"
    assert not late.moved
    assert store.history == [("1", "run"), ("3", "run")]
