"""Tests tracking on a real MLflow server, also while the server is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run

from optexport.errors import TrackingError
from optexport.parity.verify import verify
from optexport.tracking.upload import upload_bundle
from tests._helpers import exports, stores
from tests._helpers.servers import SECRET, Lossy, Server, falling_silent, postgresql
from tests.tracking.bundles import bundle, registering, runs

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgresql() as uri:
        yield uri


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, stores.store(folder) if request.param == "sqlite" else request.getfixturevalue("database"))
    yield server
    server.stop()


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Yields a list of servers that a test may stop and restart. The last one is running."""
    folder = tmp_path_factory.mktemp("mortal")
    servers = [Server(folder, stores.store(folder))]
    yield servers
    servers[-1].stop()


def optexport(*arguments: str | Path) -> subprocess.Popen[str]:
    """Starts the program in a subprocess, as a user would."""
    return subprocess.Popen(
        [sys.executable, "-m", "optexport", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def project(folder: Path, uri: str, name: str) -> Path:
    config = stores.project(folder, uri)
    text = config.read_text().replace('experiment = "tracked"', f'experiment = "{name}"')
    config.write_text(f'{text}[register]\nname = "{name}"\n')
    return config


def only(server: Server, name: str) -> Run:
    """Returns the only run of an experiment, after checking that it is complete and registered once."""
    (run,) = runs(server.uri, name)
    assert run.info.status == "FINISHED"
    client = mlflow.MlflowClient(server.uri)
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    (version,) = client.search_model_versions(f"name = '{name}'")
    assert version.run_id == run.info.run_id
    assert client.get_registered_model(name).aliases == {"champion": version.version}
    mlflow.set_tracking_uri(server.uri)
    batch = {key: tensor.numpy() for key, tensor in exports.batch(3, 11).items()}
    assert mlflow.pyfunc.load_model(f"models:/{name}@champion").predict(batch)["hidden"].shape == (3, 11, 8)
    return run


def test_a_run_on_a_server_is_complete_and_without_secrets(server: Server, tmp_path: Path) -> None:
    with_secret = f"http://someone:{SECRET}@127.0.0.1:{server.port}"
    process = optexport("run", "--json", project(tmp_path, with_secret, "whole"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert SECRET not in out + err
    assert (result["registered"]["version"], result["registered"]["moved"]) == ("1", True)
    run = only(server, "whole")
    assert SECRET not in json.dumps(run.to_dictionary())
    client = mlflow.MlflowClient(server.uri)
    version = client.get_model_version_by_alias("whole", "champion")
    assert SECRET not in repr(version) + repr(client.get_registered_model("whole"))
    downloaded = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert all(target.passed for target in verify(downloaded / "bundle").targets)
    leaks = [path for path in downloaded.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert leaks == []


def test_a_worse_version_is_registered_and_promoted_by_hand(server: Server, tmp_path: Path) -> None:
    def rated(multiple: float) -> Callable[[dict], None]:  # measured values depend on the processor
        def change(document: dict) -> None:
            registering("rated")(document)
            for target in document["parity"]["targets"]:
                target["outputs"][0]["floor_ratio"] = multiple

        return change

    upload_bundle(bundle(tmp_path, manifest=rated(0.5)), server.uri)
    worse = bundle(tmp_path, manifest=rated(1.35))
    process = optexport("upload", worse, "--uri", server.uri)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 6, err
    assert "parity: onnx-optimized, hidden: 1.35 times the noise floor (champion: 0.5)" in err
    for command, holder in ((["promote", "rated", "2"], "2"), (["rollback", "rated"], "1")):
        process = optexport(*command, "--uri", server.uri)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.startswith("rated: champion "), out
        assert out.rstrip().endswith(f"version {holder}"), out
        aliases = mlflow.MlflowClient(server.uri).get_registered_model("rated").aliases
        assert aliases == {"champion": holder}


def test_a_database_without_a_server_hides_its_password(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the default folder of artifacts
    target = bundle(tmp_path, manifest=registering("direct"))
    logged = upload_bundle(target, database, "direct")
    assert SECRET not in repr(logged)
    run = mlflow.MlflowClient(database).get_run(logged.run_id)
    assert run.info.status == "FINISHED"
    assert SECRET not in json.dumps(run.to_dictionary())
    with pytest.raises(TrackingError) as caught:
        upload_bundle(target, database.replace("optexport:", "nobody:"), "direct")
    assert "127.0.0.1" in str(caught.value)
    assert SECRET not in str(caught.value)


def before_the_start(servers: list[Server], process: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    servers[-1].stop()
    return process()


def while_it_works(servers: list[Server], process: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    program = process()
    for _ in range(1200):
        if runs(servers[-1].uri, "mortal"):
            break
        time.sleep(0.05)
    servers[-1].stop()
    return program


def while_it_sends(servers: list[Server], process: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    program = process()
    for _ in range(6000):
        matches = runs(servers[-1].uri, "mortal")
        # The model is uploaded next.
        if matches and "optexport.measurements" in matches[0].data.tags:
            break
        time.sleep(0.01)
    program.send_signal(signal.SIGSTOP)
    servers[-1].stop()
    program.send_signal(signal.SIGCONT)
    return program


@pytest.mark.parametrize("moment", [before_the_start, while_it_works, while_it_sends])
def test_a_lost_server_exits_with_7_and_a_later_upload_completes(
    mortal: list[Server], tmp_path: Path, moment: Callable[..., subprocess.Popen[str]]
) -> None:
    with_secret = f"http://someone:{SECRET}@127.0.0.1:{mortal[-1].port}"
    config = project(tmp_path, with_secret, "mortal")
    start = time.monotonic()
    process = moment(mortal, lambda: optexport("run", "--json", config))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 7, err
    # The work takes ten seconds; the rest allows for a busy machine.
    assert time.monotonic() - start < 120
    assert "The bundle on disk is complete" in err
    assert "Traceback" not in err
    assert SECRET not in out + err
    target = tmp_path / "out" / "block"
    assert all(target.passed for target in verify(target).targets)
    assert [path.name for path in target.parent.iterdir()] == ["block"]
    upload = optexport("upload", target, "--config", config)
    out, err = upload.communicate(timeout=120)
    assert upload.returncode == 7, err
    assert SECRET not in out + err
    mortal.append(mortal[-1].restarted())
    started = [run.info.run_id for run in runs(mortal[-1].uri, "mortal")]
    assert len(started) == (0 if moment is before_the_start else 1)
    for said in ("uploaded", "already uploaded"):
        again = optexport("upload", target, "--config", config)
        out, err = again.communicate(timeout=120)
        assert again.returncode == 0, err
        assert f": {said}, MLflow run " in out
        assert SECRET not in out + err
    run = only(mortal[-1], "mortal")
    assert [run.info.run_id] == (started or [run.info.run_id])
    assert run.data.params["export.formats"]
    assert run.data.metrics["time/trace_seconds"] > 0


CREATING = ["experiments/create", "runs/create", "logged-models", "registered-models/create", "model-versions/create"]


@pytest.mark.parametrize("by", ["run", "log"])
def test_lost_answers_create_no_duplicates(server: Server, tmp_path: Path, by: str) -> None:
    """MLflow repeats unanswered requests, which created two runs, two models and two versions."""
    name, lossy = f"lossy {by}", Lossy()
    with lossy.to(server.port) as uri:
        if by == "run":
            process = optexport("run", project(tmp_path, uri, name))
        else:
            target = bundle(tmp_path, manifest=registering(name))
            process = optexport("upload", target, "--uri", uri, "--experiment", name)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert [kind for kind in CREATING if not any(lost.endswith(f"/{kind}") for lost in lossy.lost)] == []
    run = only(server, name)
    client = mlflow.MlflowClient(server.uri)
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        assert len(history) == len({point.step for point in history}), key
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert len(model.metrics) == len({(metric.key, metric.step) for metric in model.metrics})


@pytest.mark.parametrize("lost", ["artifacts/bundle/model[.]onnx", "models/.*/model[.]onnx"])
def test_files_lost_to_a_login_page_are_reported_and_sent_later(server: Server, tmp_path: Path, lost: str) -> None:
    name = f"signing on {'bundle' if 'bundle' in lost else 'model'}"
    target = bundle(tmp_path, manifest=registering(name))
    with Lossy(signing_on=lost).to(server.port) as uri:
        process = optexport("upload", target, "--uri", uri, "--experiment", name)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 7, err
    assert "the store accepted the upload but does not have all files: " in err
    assert "model.onnx is missing" in err
    assert f"When the store keeps all uploaded files, run with the same options: optexport upload {target}" in err
    (run,) = runs(server.uri, name)
    assert run.info.status == "FAILED"
    upload_bundle(target, server.uri, name)
    only(server, name)


def test_the_complete_one_of_two_runs_of_a_bundle_counts(server: Server, tmp_path: Path) -> None:
    """An interrupted program may leave a newer, incomplete run, which is found first."""
    target = bundle(tmp_path, manifest=registering("two"))
    complete = upload_bundle(target, server.uri, "two")
    client = mlflow.MlflowClient(server.uri)
    (run,) = runs(server.uri, "two")
    client.create_run(run.info.experiment_id, tags=run.data.tags)
    again = upload_bundle(target, server.uri, "two")
    assert (again.run_id, again.already_uploaded) == (complete.run_id, True)
    assert len(client.search_model_versions("name = 'two'")) == 1


def test_a_silent_server_fails_within_seconds(tmp_path: Path) -> None:
    target = bundle(tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        start = time.monotonic()
        with pytest.raises(TrackingError, match="Read timed out"):
            upload_bundle(target, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - start < 30


def test_a_silent_database_fails_within_a_minute(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library waits forever and ignores signals."""
    monkeypatch.setattr("optexport.tracking.store._ANSWER_TIMEOUT", 3)
    monkeypatch.setattr("optexport.tracking.store._is_silent", False)
    monkeypatch.chdir(tmp_path)
    upload_bundle(bundle(tmp_path), database, "silent")  # creates the tables
    start = time.monotonic()
    with (
        falling_silent(database, 20_000) as uri,
        pytest.raises(TrackingError, match=r"did not answer within [35] seconds") as caught,
    ):
        upload_bundle(bundle(tmp_path), uri, "silent")
    assert time.monotonic() - start < 60
    assert SECRET not in str(caught.value)
