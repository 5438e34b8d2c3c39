"""Signals end the program at any moment, and leave no partial output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optexport._utils import atomic_dir, signals
from tests._helpers.cli import Caller, config, message

SIGNALS = pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])

# Python swallows an exception that a signal raises in a finaliser. Once only, since blame runs a rule again.
SWALLOWING = """
import os

class Dies:
    def __del__(self):
        os.kill(os.getpid(), SENT)
        list(range(1000))

class Kills(Doubles if DOUBLES else Transformation):
    preserves_computation = True

    def transform(self, graph_module):
        Dies()
        return super().transform(graph_module) if DOUBLES else graph_module

def dies():
    Dies()
    return load()
"""


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder in which the program creates its temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor"))


def sends_first(real: Callable[..., Any], sent: signal.Signals) -> Callable[..., Any]:
    """Wraps a function so that its first call sends a signal before it starts."""
    calls: list[object] = []

    def function(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            os.kill(os.getpid(), sent)
        return real(*args, **options)

    return function


@pytest.mark.sample(1)
@SIGNALS
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_swallowed_by_a_finaliser_ends_the_run(
    call: Caller, tmp_path: Path, temporary: Path, sent: signal.Signals, code: int, fails: bool
) -> None:
    module = tmp_path / "halves.py"
    added = SWALLOWING.replace("DOUBLES", str(fails)).replace("SENT", str(int(sent)))
    module.write_text(module.read_text(encoding="utf-8") + added, encoding="utf-8")
    more = '[[transformations]]\nuse = "python:halves:Kills"'
    assert message(call("run", config(more=more)), code) == "interrupted\n"
    assert left(tmp_path / "build") == left(temporary) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_after_the_last_stage_ends_the_run(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optexport.report import terminal

    class Dies:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            list(range(1000))

    real = terminal.show

    def show(*args: Any, **options: Any) -> None:
        real(*args, **options)
        Dies()

    monkeypatch.setattr(terminal, "show", show)
    result = call("run", config())
    assert result.exit_code == 130
    assert result.stderr.endswith("Error: interrupted\n")


@pytest.mark.slow
@SIGNALS
def test_signal_during_cleanup_leaves_no_temporary_folders(
    call: Caller, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    folders = tempfile.TemporaryDirectory
    monkeypatch.setattr(folders, "cleanup", sends_first(folders.cleanup, sent))
    assert message(call("run", config()), code) == "interrupted\n"
    assert left(tmp_path / "build") == left(temporary) == []


def test_signal_during_replacement_leaves_the_old_bundle(
    call: Caller, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("run", config()).exit_code == 0
    before = (tmp_path / "build" / "model" / "manifest.json").read_bytes()
    monkeypatch.setattr(atomic_dir, "_replace", sends_first(atomic_dir._replace, signal.SIGINT))
    assert message(call("run", config()), 130) == "interrupted\n"
    assert left(tmp_path / "build") == ["model"]
    assert (tmp_path / "build" / "model" / "manifest.json").read_bytes() == before
    assert left(temporary) == []


def test_signal_is_deferred_until_the_block_ends() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), signals.raising_on_signals():
        with signals.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            done = sum(range(1000)) > 0
        assert signals.received() == signal.SIGTERM
        signals.check()
    assert done
    assert signals.received() is None, "the next command starts afresh"


@pytest.mark.slow
@SIGNALS
def test_signal_during_exec_exits_with_its_own_code(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    """Python remembers an interrupt that passed through exec and acts on it under ``-m``. torch.export uses exec."""
    inner = f"import os, time; os.kill(os.getpid(), {int(sent)}); time.sleep(60)"
    (tmp_path / "program.py").write_text(
        "from optexport.cli._group import Group\n"
        "group = Group('program')\n"
        f"group.command(name='works')(lambda: exec({inner!r}))\n"
        "group(['works'])\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(signals.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "program"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (code, "Error: interrupted\n")


def test_signal_to_a_forked_process_does_not_reach_its_parent() -> None:
    starts, started = os.pipe()
    with signals.raising_on_signals():
        pid = os.fork()
        if pid == 0:
            try:
                os.write(started, b".")
                signal.pause()
            finally:
                os._exit(0)
        os.read(starts, 1)
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        assert signals.received() is None
    os.close(starts)
    os.close(started)


STARTING = """
import signal
import sys
from importlib.machinery import PathFinder

from optexport._utils import signals as interrupts

class Signals(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch.nn":
            signal.raise_signal(int(sys.argv[1]))
        return None

sys.meta_path.insert(0, Signals)
with interrupts.raising_on_signals():
    try:
        import torch
    except BaseException as error:
        print("raised within torch:", type(error).__name__)
    interrupts.check()
"""


@pytest.mark.sample(0, 1)
@SIGNALS
def test_signal_during_import_of_torch_is_raised_afterwards(sent: signal.Signals, code: int) -> None:
    """An exception raised inside the C++ code of torch aborts the process in one of thirty runs."""
    program = [sys.executable, "-c", STARTING, str(int(sent))]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    assert ended.stderr.endswith("in check\n    raise KeyboardInterrupt\nKeyboardInterrupt\n")


COMMAND = """
from optexport.cli._group import Group, json_option

group = Group("program")

@group.command(name="works")
@json_option
def works(as_json):
    import torch

group(["works", "--json"])
"""


@pytest.mark.sample(0, 1)
@SIGNALS
def test_signal_during_import_of_torch_gives_message_and_json(sent: signal.Signals, code: int) -> None:
    program = STARTING.partition("with ")[0] + COMMAND
    ended = subprocess.run([sys.executable, "-c", program, str(int(sent))], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, "Error: interrupted\n")
    document = {"passed": False, "exit_code": code, "error": "interrupted", "mlflow_run_id": None, "parity": None}
    assert json.loads(ended.stdout) == document


TWICE = """
import atexit
import os
import signal
import sys
import threading
import time

from optexport._utils import signals as interrupts
from optexport.cli._group import Group

interrupts.exit_on_signal()
first, second, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = Group("program")

class Slow:
    def __enter__(self):
        pass
    def __exit__(self, *error):
        if where == "cleanup":
            os.kill(os.getpid(), second)
            time.sleep(0.1)

@group.command(name="works")
def works():
    with Slow():
        if where != "after":
            os.kill(os.getpid(), first)
            time.sleep(60)

if where == "exit":
    atexit.register(lambda: (os.kill(os.getpid(), second), time.sleep(60)))
if where == "after":
    atexit.register(lambda: (os.kill(os.getpid(), first), time.sleep(60)))
if where == "beside":
    install = signal.signal
    def install_and_send(signum, handler):
        before = install(signum, handler)
        if signum == signal.SIGHUP:  # the last
            os.kill(os.getpid(), first)
        return before
    signal.signal = install_and_send
group(["works"])
"""


@pytest.mark.sample(1)
@SIGNALS
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["beside", "cleanup", "exit", "after"])
def test_second_signal_changes_neither_message_nor_exit_code(
    sent: signal.Signals, code: int, second: signal.Signals, where: str
) -> None:
    """A second signal led to "Aborted!" with exit code 1, or to a traceback at interpreter exit."""
    program = [sys.executable, "-c", TWICE, str(int(sent)), str(int(second)), where]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stderr) == (code, "Error: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [True, False])
def test_signal_ignored_by_the_caller_stays_ignored(ignored: bool) -> None:
    """Ctrl-C ended jobs that a script had started in the background."""
    script = "import os, signal\nfrom optexport._utils import signals as interrupts\ninterrupts.exit_on_signal()\n"
    script += "with interrupts.raising_on_signals():\n    os.kill(os.getpid(), signal.SIGINT)\n"
    how = signal.SIG_IGN if ignored else signal.SIG_DFL
    ended = subprocess.run(
        [sys.executable, "-c", script], preexec_fn=lambda: signal.signal(signal.SIGINT, how), capture_output=True
    )
    assert (ended.returncode == 0) is ignored


@pytest.mark.slow
def test_signal_during_startup_imports_leaves_no_traceback() -> None:
    script = (
        "import builtins, os, signal\nfrom optexport import __main__ as program\n"
        "real = builtins.__import__\n"
        "def hook(name, *rest):\n"
        "    if name == 'optexport.cli.main':\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = hook\nprogram.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "Error: interrupted\n")


LATE = """
import os
import signal

class Late:
    def __del__(self):  # while Python takes its modules apart, after all that is called at its end
        os.kill(os.getpid(), signal.SIGTERM)

from optexport._utils import signals as interrupts
interrupts.late = Late()
interrupts.exit_on_signal()
"""


@pytest.mark.slow
def test_signal_during_interpreter_shutdown_changes_nothing() -> None:
    """A finished or interrupted command was killed with the exit code of another signal."""
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
