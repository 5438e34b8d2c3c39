"""Tests a tracker that works in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from optexport._utils import signals
from optexport.config.schema import TrackingConfig
from optexport.errors import CheckError, ConfigError, ExportError, ParityError, TrackingError
from optexport.tracking import background, run, store
from optexport.tracking.background import TrackingProcess, make_tracker, tracking_process
from optexport.tracking.description import FAILURE
from tests._helpers import stores
from tests._helpers.servers import answering
from tests.tracking.bundles import QUIET, bundle, only_run, runs

pytestmark = QUIET

Fork = Callable[[TrackingConfig], Any]


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Fork:
    """Starts the process although torch is imported here; the process has the patches of a test."""

    @contextmanager
    def start(config: TrackingConfig) -> Iterator[TrackingProcess]:
        monkeypatch.setattr(background, "_is_useful", lambda: True)
        with tracking_process(config) as process:
            assert process is not None
            yield process

    return start


def test_a_run_is_tracked_and_its_bundle_is_sent(tmp_path: Path, fork: Fork) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    with fork(config) as process:
        tracker = make_tracker(config, tmp_path / "config.toml", bundle(tmp_path), process)
        with run.tracking(tracker, {}, {"part": "a part"}):
            running = only_run(config.store)
            assert (running.info.run_id, running.info.status) == (tracker.run_id, "RUNNING")
            tracker.send()
    finished = only_run(config.store)
    assert (finished.info.status, finished.data.tags["part"], tracker.failure) == ("FINISHED", "a part", None)
    assert tracker.page is not None
    assert tracker.page.endswith(f"/runs/{tracker.run_id}?workflowType=machine_learning")
    assert finished.data.metrics
    assert not process.process.is_alive()


class UnsendableError(ExportError):
    def __init__(self, message: str, reason: str) -> None:
        super().__init__(f"{message} {reason}")
        self.reason = lambda: reason


@pytest.mark.parametrize(
    "error", [CheckError("it differs"), UnsendableError("no", "file"), ValueError(lambda: "cannot be sent")]
)
def test_an_error_of_the_run_ends_it_as_failed(tmp_path: Path, fork: Fork, error: Exception) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    with fork(config) as process:
        tracker = make_tracker(config, None, tmp_path / "out", process)
        with pytest.raises(type(error)), run.tracking(tracker, {}, {}):
            raise error
    failed = only_run(config.store)
    assert (failed.info.status, failed.data.tags[run.REASON_TAG]) == ("FAILED", str(error))
    assert getattr(error, "run_id", tracker.run_id) == failed.info.run_id


def test_a_failed_check_sends_its_folder_or_says_that_it_could_not(
    tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked"), tmp_path / "out-failure"
    folder.mkdir()
    (folder / "reproduce.py").touch()
    for is_refused in (False, True):
        if is_refused:
            monkeypatch.setattr(run, "send_failure", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        error = ParityError("it differs", details="a fact")
        error.folder = folder
        with fork(config) as process:
            tracker = make_tracker(config, None, tmp_path / "out", process)
            with pytest.raises(ParityError), run.tracking(tracker, {}, {}):
                raise error
        sent = [file.path for file in mlflow.MlflowClient(config.store).list_artifacts(error.run_id or "", FAILURE)]
        assert sent == ([] if is_refused else [f"{FAILURE}/reproduce.py"])
        lost = "\nThe MLflow run lacks files of this failure: OSError: no room"
        assert error.details == f"a fact{lost if is_refused else ''}"


def test_a_mistake_in_the_config_deletes_the_run(tmp_path: Path, fork: Fork) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    with fork(config) as process:
        tracker = make_tracker(config, None, tmp_path / "out", process)
        with pytest.raises(ConfigError), run.tracking(tracker, {}, {}):
            raise ConfigError("a mistake")
    assert runs(config.store) == []


def test_a_later_secret_is_hidden(tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    with fork(config) as process:
        tracker = make_tracker(config, None, tmp_path / "out", process)
        monkeypatch.setenv("SOME_TOKEN", "hunter2hunter2")
        with pytest.raises(ValueError, match="refused"), run.tracking(tracker, {}, {}):
            raise ValueError("refused: hunter2hunter2")
    assert only_run(config.store).data.tags[run.REASON_TAG] == "refused: ***"


@pytest.mark.parametrize(("function", "seconds"), [("prepare", 3), ("experiment_id", 60)])
def test_an_interrupt_before_the_run_exists_creates_none(
    function: str, seconds: int, tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    monkeypatch.setattr(store, function, lambda *_: time.sleep(seconds))
    with fork(config) as process:
        tracker = make_tracker(config, None, tmp_path / "out", process)
        with pytest.raises(KeyboardInterrupt), interrupt_after(1), run.tracking(tracker, {}, {}):
            raise AssertionError
    assert runs(config.store) == []


def test_two_signals_do_not_leave_a_run_running(tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked")
    monkeypatch.setattr(store, "prepare", lambda *_: time.sleep(4))
    with fork(config) as process:
        tracker = make_tracker(config, None, tmp_path / "out", process)
        with pytest.raises(KeyboardInterrupt), signals.raising_on_signals():
            for seconds in (0.5, 2):
                threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()
            with run.tracking(tracker, {}, {}):
                raise AssertionError
    assert runs(config.store) == []


def test_an_interrupted_upload_names_the_command_that_completes_it(
    tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, target = TrackingConfig(uri=stores.store(tmp_path), experiment="tracked"), bundle(tmp_path)
    monkeypatch.setattr(run, "send_bundle", lambda *_: time.sleep(60))
    with fork(config) as process:
        tracker = make_tracker(config, None, target, process)
        with pytest.raises(KeyboardInterrupt) as caught, run.tracking(tracker, {}, {}), interrupt_after(0.2):
            tracker.send()
    assert caught.value.__notes__ == [
        f"The bundle on disk is complete. To upload it, run: optexport upload {target} --uri {config.store}"
    ]
    assert only_run(config.store).info.status == "KILLED"


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_failure_of_the_server_has_its_traceback(tmp_path: Path, fork: Fork) -> None:
    with answering(500) as uri:
        config = TrackingConfig(uri=uri)
        with fork(config) as process:
            tracker = make_tracker(config, None, tmp_path / "out", process)
            with run.tracking(tracker, {}, {}):
                assert isinstance(tracker.failure, TrackingError)
    assert tracker.failure.location == f"tracking.uri: {uri}"
    assert "Traceback" in tracker.failure.__notes__[0]  # for --debug


def test_the_death_of_the_process_is_a_tracking_error(tmp_path: Path, fork: Fork) -> None:
    config, target = TrackingConfig(uri=stores.store(tmp_path)), bundle(tmp_path)
    with fork(config) as process:
        tracker = make_tracker(config, None, target, process)
        with run.tracking(tracker, {}, {}):
            os.kill(process.process.pid, signal.SIGKILL)
            tracker.send()
    assert str(tracker.failure) == (
        f"tracking.uri: {config.store}: the process that sends the run to MLflow has ended\n"
        f"Hint: The bundle on disk is complete. To upload it, run: optexport upload {target} --uri {config.store}"
    )


def test_nothing_is_started_without_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_is_useful", lambda: True)
    with tracking_process(TrackingConfig(enabled=False)) as process:
        assert process is None


_RUN = """
import sys
from optexport.__main__ import main
try:
    main()
finally:
    print("mlflow" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
def test_a_command_does_not_import_mlflow_itself(tmp_path: Path) -> None:
    config = stores.project(tmp_path, f"sqlite:///{tmp_path}/new.db")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    process = subprocess.run(
        [sys.executable, "-c", _RUN, "run", str(config), "--json"], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.splitlines()[-1] == "False"
    run_id = json.loads(process.stdout)["mlflow_run_id"]
    finished = only_run(f"sqlite:///{tmp_path}/new.db")
    assert (finished.info.run_id, finished.info.status) == (run_id, "FINISHED")
    measurements = json.loads((tmp_path / "out" / "block" / "measurements.json").read_text())
    assert measurements["origin"]["mlflow_run"] == run_id


@pytest.mark.sample(0, 1)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_command_its_run_and_its_processes(sent: signal.Signals, tmp_path: Path) -> None:
    config = stores.project(tmp_path, uri := stores.store(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    command = [sys.executable, "-m", "optexport", "run", str(config)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as program:
        assert program.stderr is not None
        while "start tracking" not in (line := program.stderr.readline()):
            assert line
        children = psutil.Process(program.pid).children()
        assert children
        os.killpg(program.pid, sent)
        rest = program.stderr.read()  # ends when all processes have ended
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    status, code = ("RUNNING", -sent) if sent == signal.SIGKILL else ("KILLED", 128 + sent)
    assert (only_run(uri).info.status, program.returncode) == (status, code)
    assert rest.endswith("Error: interrupted\n") == (sent != signal.SIGKILL)
