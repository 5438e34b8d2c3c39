"""Supervision of a subprocess: limits, retries, and the end of all processes that it started.

A shell script replaces the CLI and runs the text of a config as a script, so that torch is not imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from optexport.batch import supervisor
from optexport.batch.results import TaskResult
from optexport.batch.summary import describe
from optexport.batch.supervisor import Limits, Supervisor, supervise
from optexport.batch.tasks import Task, find_tasks

_SUCCEED = """echo '{"exit_code": 0}'"""
_LIMITS = Limits(memory=2**34, seconds=600, retries=0)

# Starts a process in another session, whose parent exits at once.
_DAEMON = """
cat > daemon.py <<'END'
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon", "w").write(str(os.getpid()))
        os.rename("daemon", "pid")
        if sys.argv[1:]:
            eaten = b"x" * (300 << 20)
        time.sleep(600)
    os._exit(0)
os.wait()
END
"$PYTHON" daemon.py $ARGUMENTS
while ! test -e pid; do sleep 0.01; done
"""

# Starts processes that live for a few milliseconds and start their successor.
_HOPPERS = """
cat > hop.py <<'END'
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        while True:
            open("hop", "w").write(str(os.getpid()))
            time.sleep(0.005)
            if os.fork():
                os._exit(0)
END
"$PYTHON" hop.py
sleep 600
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the CLI by a program that runs its fifth argument, the config, as a shell script."""
    path = tmp_path / "program"
    cleaner = 'case "$3" in optexport.batch.processes) exec "$PYTHON" "$@";; esac'
    path.write_text(f'#!/bin/sh\n{cleaner}\nexec sh "$5"\n', encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)


def _tasks(folder: Path, *scripts: str) -> list[Task]:
    paths = []
    for index, script in enumerate(scripts):
        path = folder / f"{index}.toml"
        path.write_text(script, encoding="utf-8")
        paths.append(str(path))
    return find_tasks(paths)


Run = Callable[..., TaskResult]


@pytest.fixture
def run(program: None, tmp_path: Path) -> Run:
    def run(script: str, limits: Limits = _LIMITS) -> TaskResult:
        (task,) = _tasks(tmp_path, script)
        with supervise(limits, tmp_path, threading.Event()) as supervisor:
            result = supervisor.run(task)
            assert list(supervisor.temporary.iterdir()) == []
        return result

    return run


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("script", "words", "error"),
    [
        ("kill -SEGV $$", "crashed", "the process crashed with SIGSEGV"),
        ("kill -KILL $$", "killed", "the process was killed by SIGKILL"),
        ("exit 3", "no result", "the process exited with 3 and wrote no result"),
        ("echo '{'", "no result", "the process exited with 0 and wrote no result"),
    ],
)
def test_process_without_a_result_has_failed(run: Run, script: str, words: str, error: str, tmp_path: Path) -> None:
    result = run(script)
    assert (result.exit_code, describe(result)) == (1, words)
    assert str(result.error).startswith(f"{error}")
    (log,) = tmp_path.glob("0-*.log")
    assert str(result.error).endswith(f"Log: {log}")


def test_output_and_log_are_stored(run: Run, tmp_path: Path) -> None:
    assert run(f"{_SUCCEED}; echo message >&2").error is None
    assert [path.read_text(encoding="utf-8") for path in tmp_path.glob("0-*.log")] == ["message\n"]


@pytest.mark.parametrize("script", ["sleep 600", "trap '' TERM; while :; do sleep 0.1; done"])
def test_hanging_process_is_ended_even_if_it_ignores_sigterm(run: Run, script: str) -> None:
    start = time.monotonic()
    result = run(script, Limits(2**34, 0.5, 0))
    assert str(result.error).startswith("the process did not finish within 0.5 s")
    assert describe(result) == "timeout"
    assert time.monotonic() - start < 60


def test_process_has_time_to_end_after_sigterm(run: Run, tmp_path: Path) -> None:
    run(f"trap 'touch {tmp_path}/done; exit' TERM; while :; do sleep 0.1; done", Limits(2**34, 0.5, 0))
    assert (tmp_path / "done").exists()


def test_crash_is_retried_and_a_result_is_not(run: Run) -> None:
    crashes_once = f"if test -e crashed; then {_SUCCEED}; else touch crashed; kill -ABRT $$; fi"
    result = run(crashes_once, Limits(2**34, 600, 2))
    assert (result.exit_code, result.attempts) == (0, 2)
    result = run("""echo '{"exit_code": 2, "error": "wrong"}'; exit 2""", Limits(2**34, 600, 2))
    assert (result.exit_code, result.attempts, result.error) == (2, 1, "wrong")


@pytest.mark.slow
@pytest.mark.parametrize("then", [_SUCCEED, "kill -ABRT $$", "sleep 600"])
def test_daemon_ends_with_the_attempt(run: Run, tmp_path: Path, then: str) -> None:
    run(f"{_DAEMON}\n{then}", Limits(2**34, 5, 0))
    assert not _is_alive(int((tmp_path / "pid").read_text(encoding="utf-8")))


def test_memory_of_a_daemon_counts(run: Run, tmp_path: Path) -> None:
    result = run(f"ARGUMENTS=eat\n{_DAEMON}\nsleep 600", Limits(200 << 20, 600, 1))
    assert str(result.error).startswith("the process used more than 0.2 GiB of memory")
    assert result.peak_memory > 200 << 20
    assert result.attempts == 1, "another attempt would take as much"
    assert not _is_alive(int((tmp_path / "pid").read_text(encoding="utf-8")))


@pytest.mark.slow
def test_processes_that_constantly_replace_themselves_are_ended(run: Run, tmp_path: Path) -> None:
    run(_HOPPERS, Limits(2**34, 2, 0))
    last = (tmp_path / "hop").read_bytes()
    time.sleep(0.5)
    assert (tmp_path / "hop").read_bytes() == last


def test_processes_of_another_attempt_are_not_ended(program: None, tmp_path: Path) -> None:
    slow, fast = _tasks(
        tmp_path, f"touch started; sleep 0.5; {_SUCCEED}", f"while ! test -e started; do :; done; {_SUCCEED}"
    )
    with _supervisor(tmp_path) as supervisor, ThreadPoolExecutor(2) as pool:
        assert [result.exit_code for result in pool.map(supervisor.run, (slow, fast))] == [0, 0]


def test_concurrent_processes_report_their_own_exit_codes(program: None, tmp_path: Path) -> None:
    """Threads that wait for subprocesses must not take each other's exit codes."""
    tasks = _tasks(tmp_path, *(f"""echo '{{"exit_code": {code}}}'""" for code in range(24)))
    with _supervisor(tmp_path) as supervisor, ThreadPoolExecutor(12) as pool:
        assert [result.exit_code for result in pool.map(supervisor.run, tasks)] == list(range(24))


def test_stopped_batch_ends_its_attempts(program: None, tmp_path: Path) -> None:
    (task,) = _tasks(tmp_path, "touch started; sleep 600")
    stop = threading.Event()
    with supervise(Limits(2**34, 600, 5), tmp_path, stop) as supervisor, ThreadPoolExecutor(1) as pool:
        running = pool.submit(supervisor.run, task)
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        stop.set()
        result = running.result(60)
    assert (str(result.error).splitlines()[0], result.attempts) == ("interrupted", 1)


_KILLED = """
import sys, threading
from pathlib import Path
from optexport.batch.supervisor import Limits, supervise
from optexport.batch.tasks import find_tasks

sys.executable = sys.argv[1]
with supervise(Limits(2**34, 600, 0), Path(), threading.Event()) as supervisor:
    supervisor.run(find_tasks(["0.toml"])[0])
"""


def test_killed_batch_leaves_neither_processes_nor_files(
    program: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tasks(tmp_path, f"{_DAEMON}\nsleep 600")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with subprocess.Popen([os.environ["PYTHON"], "-c", _KILLED, sys.executable]) as batch:
        _wait_for((tmp_path / "pid").exists)
        batch.send_signal(signal.SIGKILL)
    daemon = int((tmp_path / "pid").read_text(encoding="utf-8"))
    _wait_for(lambda: not _is_alive(daemon) and not list(temporary.iterdir()))


def _supervisor(folder: Path) -> AbstractContextManager[Supervisor]:
    return supervise(_LIMITS, folder, threading.Event())


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
