"""Tracking on a real MLflow server: whole while it is up, and no harm done when it is not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from optexport.verification import verify
from tests import exports, stores

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]

SECRET = "hunter2"


class Server:
    """An ``mlflow server`` on this machine alone, with a store and artifacts of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port: int = taken.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        store = stores.store(folder)
        self.log = (folder / "server.log").open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                "--workers", "1", "--backend-store-uri", store,
                "--artifacts-destination", str(folder / "artifacts"),
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        self._wait(folder / "server.log")

    def _wait(self, log: Path) -> None:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{log.read_text()}")

    def stop(self) -> None:
        """Ends the server and its workers at once, as a crash would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.stop()


def optexport(config: Path) -> subprocess.Popen[str]:
    """Starts ``optexport run --json`` as a user would, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "optexport", "run", "--json", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"},
    )


def test_a_run_on_a_server_is_whole_and_its_model_loads_by_name(server: Server, tmp_path: Path) -> None:
    with_secret = f"http://someone:{SECRET}@127.0.0.1:{server.port}"
    done = optexport(stores.project(tmp_path, with_secret))
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    result = json.loads(out)
    assert SECRET not in out + err
    client = mlflow.MlflowClient(server.uri)
    experiment = client.get_experiment_by_name("tracked")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert SECRET not in json.dumps(run.to_dictionary())
    assert SECRET not in json.dumps(result)
    downloaded = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert all(place.passed for place in verify(downloaded / "bundle").places)
    told = [path for path in downloaded.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert told == []
    mlflow.set_tracking_uri(server.uri)
    model = mlflow.pyfunc.load_model(f"models:/{run.outputs.model_outputs[0].model_id}")
    batch = exports.batch(3, 11)
    assert model.predict({name: tensor.numpy() for name, tensor in batch.items()})["hidden"].shape == (3, 11, 8)


def test_a_server_that_is_down_ends_with_seven_and_a_whole_bundle(server: Server, tmp_path: Path) -> None:
    server.stop()
    done = optexport(stores.project(tmp_path, f"http://someone:{SECRET}@127.0.0.1:{server.port}"))
    out, err = done.communicate(timeout=300)
    assert done.returncode == 7
    assert "The bundle is whole on disk" in err
    assert "Traceback" not in err
    assert SECRET not in out + err
    assert all(place.passed for place in verify(tmp_path / "out" / "block").places)


def test_a_server_that_dies_in_the_middle_ends_with_seven_and_a_whole_bundle(server: Server, tmp_path: Path) -> None:
    process = optexport(stores.project(tmp_path, server.uri))
    client = mlflow.MlflowClient(server.uri)
    for _ in range(1200):
        experiment = client.get_experiment_by_name("tracked")
        if experiment is not None and client.search_runs([experiment.experiment_id]):
            break
        time.sleep(0.1)
    server.stop()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 7, err
    assert "The bundle is whole on disk" in err
    assert "Traceback" not in err
    assert all(place.passed for place in verify(tmp_path / "out" / "block").places)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["block"]
