"""Tests the choice of the tracking store, and that MLflow settings of the user stay."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optexport.config.load import load_config
from optexport.config.schema import TrackingConfig
from optexport.errors import ConfigError
from optexport.pipeline import run
from optexport.redaction import keep_secret
from optexport.tracking import store
from optexport.tracking.run import Tracker
from tests._helpers import stores
from tests.tracking.bundles import QUIET, only_run, runs

pytestmark = QUIET


def test_a_relative_store_path_refers_to_the_config_folder(tmp_path: Path) -> None:
    assert store.resolved_uri("sqlite:///mlflow.db", tmp_path) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    for uri in (f"sqlite:///{tmp_path}/x.db", "http://127.0.0.1:5000", "databricks"):
        assert store.resolved_uri(uri, tmp_path) == uri


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "http://127.0.0.1:9"])
def test_opening_a_store_leaves_the_environment(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run in the process logged into the store of the run before it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if before is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", before)
    stores.store(tmp_path)
    store.open_store("sqlite:///mlflow.db", tmp_path)
    assert os.environ.get("MLFLOW_TRACKING_URI") == before


def test_the_command_to_serve_a_run_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/other folder/mlflow.db"
    command, address = store.page(uri, "1", "abc").splitlines()
    assert shlex.split(command)[1:] == ["ui", "--backend-store-uri", uri]
    assert address == "http://127.0.0.1:5000/#/experiments/1/runs/abc?workflowType=machine_learning"


def test_the_address_of_a_run_omits_the_server_password() -> None:
    keep_secret(uri := "http://me:hunter2secret@127.0.0.1:5000/")
    assert store.page(uri, "1", "abc") == "http://127.0.0.1:5000/#/experiments/1/runs/abc?workflowType=machine_learning"


@pytest.mark.slow
def test_without_tracking_there_is_no_run_and_no_store(tmp_path: Path) -> None:
    config = stores.project(tmp_path, "sqlite:///mlflow.db", formats='["pt2"]')
    config.write_text(config.read_text().replace("[tracking]", "[tracking]\nenabled = false"))
    result = run.run(config)
    assert (result.run_id, result.run_page, result.tracking_failure) == (None, None, None)
    assert not (tmp_path / "mlflow.db").exists()


def test_two_runs_of_one_experiment_are_separate(tmp_path: Path) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path))
    first, second = (Tracker(config, tmp_path / "config.toml", tmp_path / "out") for _ in range(2))
    for tracker in (first, second):
        tracker.start({}, {})
        tracker.end()
    assert first.run_id != second.run_id
    assert first.failure is second.failure is None
    assert {run.info.run_id for run in runs(config.uri)} == {first.run_id, second.run_id}


@pytest.mark.slow
def test_several_processes_can_create_a_database_at_once(tmp_path: Path) -> None:
    """Each process created the tables, and all but one failed."""
    program = (
        "import sys; from pathlib import Path; from optexport.tracking import store\n"
        "print(len(store.open_store('sqlite:///new.db', Path(sys.argv[1])).search_experiments()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        output, errors = process.communicate()
        assert (process.returncode, output) == (0, "1\n"), errors


@pytest.mark.slow
def test_an_interrupted_database_creation_is_repeated(tmp_path: Path) -> None:
    """The database had half of its tables, and MLflow always refused it."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    command = [
        sys.executable,
        "-c",
        "import sys; from optexport.tracking import store; store.open_store(sys.argv[1], '')",
    ]
    with subprocess.Popen([*command, uri]) as process:
        while not any(draft.stat().st_size > 100_000 for draft in tmp_path.glob(".mlflow.db.partial-*/mlflow.db")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert not (tmp_path / "mlflow.db").exists() or (tmp_path / "mlflow.db").stat().st_size == 0
    client = store.open_store(uri, tmp_path)
    assert client.get_experiment_by_name("Default") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", ["a%20b", "what?x"])
def test_a_folder_name_unfit_for_mlflow_is_refused_early(tmp_path: Path, name: str) -> None:
    """MLflow used another path after a %, and read everything after a ? as a query."""
    (tmp_path / name).mkdir()
    config = stores.project(tmp_path / name, "sqlite:///mlflow.db")
    with pytest.raises(
        ConfigError, match=r'tracking\.uri: MLflow cannot open a database in .*, because the path has "(%20|\?)"'
    ):
        run.run(config)
    assert "mlflow.db" not in {path.name for path in tmp_path.rglob("*")}
    absolute = stores.project(tmp_path / name, f"sqlite:///{tmp_path / 'mlflow.db'}", formats='["pt2"]')
    assert run.run(absolute).tracking_failure is None


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", ["a b#c", "100%", "50%off"])
def test_a_folder_of_almost_any_name_holds_its_store(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / name).mkdir()
    load_config(stores.project(folder, "sqlite:///mlflow.db"))
    assert store.open_store("sqlite:///mlflow.db", folder).get_experiment_by_name("Default") is not None
    assert "mlflow.db" in {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_symlink_to_a_new_database_stays_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "volume" / "real.db")
    (tmp_path / "volume" / "real.db.partial").write_text("mine")
    store.open_store(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path)
    assert (tmp_path / "mlflow.db").is_symlink()
    assert (tmp_path / "volume" / "real.db").stat().st_size > 100_000
    assert {path.name for path in (tmp_path / "volume").iterdir()} == {"real.db", "real.db.partial"}


@pytest.mark.slow
def test_a_config_outside_a_repository_gets_no_commit_tag(tmp_path: Path) -> None:
    """MLflow would record the commit of the calling program."""
    uri = stores.store(tmp_path)
    run.run(stores.project(tmp_path, uri, formats='["pt2"]'))
    assert [tag for tag in only_run(uri).data.tags if tag.startswith("mlflow.source.git")] == []


@pytest.mark.slow
def test_user_settings_of_telemetry_and_timeout_stay() -> None:
    names = ("MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    code = f"""
import os
import optexport
from optexport.tracking import store
store.import_mlflow()
with store.short_timeout():
    print(*[os.environ[name] for name in {names}])
import huggingface_hub.constants, mlflow.telemetry.utils
print(huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY, os.environ["MLFLOW_DISABLE_TELEMETRY"])
"""
    plain = {key: value for key, value in os.environ.items() if key not in names}

    def told(**settings: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env={**plain, **settings}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert told() == "true 1 5\nTrue true\n"
    chosen = dict(zip(names, ("false", "0", "77"), strict=True))
    assert told(**chosen) == "false 0 77\nFalse false\n"
