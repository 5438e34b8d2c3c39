"""Atomic output folders: killed runs, and concurrent runs with one output."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from optexport import export
from optexport._utils import atomic_dir
from optexport.bundle import digests
from optexport.bundle.layout import GENERATION, REPORT, check_replaceable
from optexport.bundle.parts import read_bundles
from optexport.errors import ConfigError
from optexport.report.html import page
from tests._helpers import exports


def drafting(
    output: Path,
    check: Callable[[Path], None] = check_replaceable,
    output_lock: contextlib.ExitStack | None = None,
) -> contextlib.AbstractContextManager[Path]:
    """Opens a draft as a run does, which replaces only bundles."""
    return atomic_dir.drafting(output, check, output_lock)


_CONTEXT = multiprocessing.get_context("fork")  # all modules are imported already


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _write_and_wait(output: Path, ready: object) -> None:
    with drafting(output) as draft:
        (draft / "half").touch()
        ready.set()  # type: ignore[attr-defined]
        time.sleep(600)


@pytest.fixture
def other_process(tmp_path: Path) -> multiprocessing.process.BaseProcess:
    """Returns the process of another run that is writing ``out``."""
    ready = _CONTEXT.Event()
    process = _CONTEXT.Process(target=_write_and_wait, args=(tmp_path / "out", ready), daemon=True)
    process.start()
    assert ready.wait(60)
    return process


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_second_run_to_a_locked_output_fails(
    tmp_path: Path, other_process: multiprocessing.process.BaseProcess
) -> None:
    before = _names(tmp_path)
    with pytest.raises(ConfigError, match="another run is writing to this folder"), drafting(tmp_path / "out"):
        pass
    assert _names(tmp_path) == before
    with drafting(tmp_path / "out-baseline") as draft:  # another output with the same prefix
        (draft / "file").touch()
    _kill(other_process)


def test_locked_bundle_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with contextlib.ExitStack() as output_lock:
        with drafting(output, output_lock=output_lock) as draft:
            (draft / "first").touch()
        with (
            pytest.raises(ConfigError, match="the bundle in this folder is being uploaded to MLflow") as caught,
            drafting(output),
        ):
            pass
        assert "Wait until the upload has ended" in str(caught.value)
        assert _names(tmp_path) == [".out.lock", "out"]
    assert _names(tmp_path) == ["out"]
    with drafting(output, lambda place: None) as draft:
        (draft / "second").touch()
    assert _names(output) == ["second"]


def test_finished_run_waits_for_the_lock_on_its_output(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    about_to_end = threading.Event()

    def run() -> None:
        with drafting(output) as draft:
            (draft / "new").touch()
            assert about_to_end.wait(60)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        while not list(tmp_path.glob(".out.partial-*/new")):
            time.sleep(0.01)
        with atomic_dir.locked(output, wait=True):
            about_to_end.set()
            time.sleep(0.3)
            assert not running.done()
            assert _names(output) == []
        running.result(60)
    assert _names(output) == ["new"]


def test_waiting_processes_hold_the_lock_one_at_a_time(tmp_path: Path) -> None:
    """Each process removes the lock file on release, while others wait for it."""
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(20):
            with atomic_dir.locked(tmp_path / "out", wait=True):
                value = int(counter.read_text())
                time.sleep(0.001)
                counter.write_text(str(value + 1))

    processes = [_CONTEXT.Process(target=count, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert counter.read_text() == "80"
    assert _names(tmp_path) == ["counter"]


def test_draft_of_a_killed_run_is_removed_by_the_next_run(
    tmp_path: Path, other_process: multiprocessing.process.BaseProcess
) -> None:
    _kill(other_process)
    draft, lock = _names(tmp_path)
    assert (draft.startswith(".out.partial-"), lock) == (True, ".out.partial.lock")
    with drafting(tmp_path / "out") as draft:
        (draft / "whole").touch()
    assert _names(tmp_path) == ["out"]


def test_glob_characters_in_output_names_are_literal(tmp_path: Path) -> None:
    with drafting(tmp_path / "o*[ut]?") as draft:
        (draft / "file").touch()
        with drafting(tmp_path / "out") as another:
            (another / "file").touch()
    assert _names(tmp_path) == ["o*[ut]?", "out"]


def test_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with drafting(tmp_path / "out", lambda output: None) as draft:
            (draft / "file").write_text(content)
    assert (tmp_path / "out" / "file").read_text() == "second"
    assert _names(tmp_path) == ["out"]


def test_bundle_is_restored_if_the_new_one_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".out.partial-"):
            raise OSError("no")
        return rename(path, target)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("first")
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"), drafting(tmp_path / "out", lambda output: None):
        pass
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert _names(tmp_path) == ["out"]


def _replace_and_die(output: Path, dies_before: int) -> None:
    """Replaces a bundle by a copy of the shared export, and kills the process before the n-th rename."""
    rename, calls = Path.rename, itertools.count(1)

    def renames(path: Path, target: Path) -> Path:
        if next(calls) == dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = renames  # type: ignore[method-assign, assignment]
    with drafting(output) as draft:
        shutil.copytree(exports.exported().output, draft, dirs_exist_ok=True)


@pytest.mark.parametrize("dies_before", [1, 2, 3])
@pytest.mark.parametrize("reads_first", [True, False])
def test_bundle_is_complete_after_a_kill_at_any_rename(tmp_path: Path, dies_before: int, reads_first: bool) -> None:
    output = Path(shutil.copytree(exports.exported().output, tmp_path / "out"))
    process = _CONTEXT.Process(target=_replace_and_die, args=(output, dies_before), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert output.exists() is (dies_before != 2)
    if reads_first:
        digests.read_manifest(output)
        read_bundles(output)
    with pytest.raises(KeyboardInterrupt), drafting(output):  # a failing run restores it too
        raise KeyboardInterrupt
    digests.read_manifest(output)
    assert _names(tmp_path) == ["out"]


def test_recovery_waits_for_a_replacement_of_the_bundle(tmp_path: Path) -> None:
    output = tmp_path / "out"
    previous = atomic_dir._previous(output)
    previous.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with atomic_dir.locked(output, wait=True):
            reading = pool.submit(atomic_dir.recover, output)
            time.sleep(0.3)
            assert not reading.done()
            output.mkdir()
            (output / "new").touch()
        reading.result(60)
    assert _names(output) == ["new"]


def test_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: FileLock, *, blocking: bool) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with drafting(tmp_path / "out") as draft:
        (draft / "file").touch()
    assert _names(tmp_path) == ["out"]


def _export(output: Path) -> None:
    export(exports.block(), exports.batch(), output, formats=["onnx"], dynamic=exports.DYNAMIC, effort="quick")


def _killed_after(seconds: float, output: Path) -> bool:
    """Kills a run after some seconds, and returns True if it was still running."""
    process = _CONTEXT.Process(target=_export, args=(output,))
    process.start()
    process.join(seconds)
    process.kill()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(3, 0), pytest.param(100, 1, marks=pytest.mark.nightly)])
def test_kills_at_random_moments_leave_a_complete_bundle_or_none(tmp_path: Path, kills: int, seed: int) -> None:
    output, generator = tmp_path / "out", random.Random(seed)
    start = time.monotonic()
    _export(output)  # also imports modules that are imported lazily
    duration = time.monotonic() - start
    killed = attempts = 0
    # On a busy machine the timed run can be the slowest, so that later runs end before they are killed.
    while attempts < kills or killed <= kills / 4:
        attempts += 1
        assert attempts < 20 * kills
        killed += _killed_after(generator.uniform(0, duration), output)
        digests.read_manifest(output)  # either the old manifest or the new one
    _export(output)
    digests.read_manifest(output)
    assert _names(tmp_path) == ["out"]


def _write_parts(output: Path) -> None:
    with drafting(output) as draft:
        for part in ("encoder", "decoder"):
            with drafting(draft / part) as inner:
                (inner / "file").touch()


def test_nested_drafts_do_not_deadlock(tmp_path: Path) -> None:
    """Generation writes the bundle of each part in a nested draft."""
    process = _CONTEXT.Process(target=_write_parts, args=(tmp_path / "out",), daemon=True)
    process.start()
    process.join(60)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()
    assert _names(tmp_path / "out") == ["decoder", "encoder"]


def _rewrite(bundle: Path, dies_before: int) -> None:
    """Writes a bundle's report again, and kills the process before the n-th replacement of a file."""
    replace = Path.replace
    calls = itertools.count(1)

    def replaces(path: Path, target: Path) -> Path:
        if next(calls) == dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Path.replace = replaces  # type: ignore[method-assign, assignment]
    page.write(bundle)


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("dies_before", [1, 2, 3])
@pytest.mark.parametrize("is_part", [False, True])
def test_killed_report_leaves_a_valid_bundle(dies_before: int, is_part: bool, tmp_path: Path) -> None:
    place = tmp_path / "model"
    if is_part:
        place.mkdir()
        (place / GENERATION).touch()
    bundle = Path(shutil.copytree(exports.exported().output, place / "part" if is_part else place))
    with pytest.MonkeyPatch.context() as patch:  # the reports must differ
        patch.setattr(page, "_MAX_CONFIG", 10)
        page.write(bundle)
    before, inside = (bundle / REPORT).read_bytes(), _names(place)
    process = _CONTEXT.Process(target=_rewrite, args=(bundle, dies_before), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    digests.read_manifest(bundle)
    assert _names(place) == inside
    assert len(_names(tmp_path)) == 2  # the killed process left a folder
    assert ((bundle / REPORT).read_bytes() == before) == (dies_before < 3)
    check_replaceable(bundle)
    page.write(bundle)
    digests.read_manifest(bundle)
    assert _names(tmp_path) == ["model"]
    assert (bundle / REPORT).read_bytes() != before


def test_scratch_folders_of_one_bundle_do_not_conflict(tmp_path: Path) -> None:
    bundle = tmp_path / "model"
    bundle.mkdir()
    with atomic_dir.scratch(bundle) as first, atomic_dir.scratch(bundle) as second:
        assert first.parent == second.parent == tmp_path
        assert first != second
    with drafting(tmp_path / "out") as draft, atomic_dir.scratch(draft) as within:
        assert within.parent == draft
    assert _names(tmp_path) == ["model", "out"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is a command of util-linux")
def test_flock_on_the_parent_folder_does_not_block_a_run(tmp_path: Path) -> None:
    """``flock out optexport run`` deadlocked."""
    with subprocess.Popen(["flock", str(tmp_path), "sleep", "60"]) as holder:
        try:
            with drafting(tmp_path / "out") as draft:
                (draft / "whole").touch()
        finally:
            holder.kill()
    assert _names(tmp_path) == ["out"]
