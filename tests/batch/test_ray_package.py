"""A config that travels: with what it names, and back with what came of it, to where a local run would have put it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optexport import verify
from optexport._utils.atomic_dir import locked
from optexport.batch.ray_package import brought_home, check_portable, packed, run_there
from optexport.batch.supervisor import Limits
from optexport.batch.tasks import Task, tasks_of
from optexport.errors import ConfigError
from tests.batch import fleets

_LIMITS = Limits(4 << 30, 300.0, 0)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = tmp_path / "configs"
    place.mkdir()
    path = fleets.config(place, "a")
    np.savez(tmp_path / "x.npz", input=np.ones((3, 4), dtype=np.float32))
    data = 'data = "../x.npz"\naxes.input = ["batch", "width"]'
    text = path.read_text(encoding="utf-8").replace('tensors.input.shape = ["batch", 4]', data)
    path.write_text(text.replace('"out/a"', '"../out/a"'), encoding="utf-8")
    (found,) = tasks_of([str(path)])
    return found


def test_what_lies_elsewhere_travels_too_and_the_bundle_comes_to_its_place(task: Task, tmp_path: Path) -> None:
    found = run_there(packed(task), _LIMITS)
    assert found.ended.error is None
    assert not (tmp_path / "out").exists()
    ended = brought_home(task, tmp_path, found)
    assert (ended.config, ended.exit_code, ended.output) == (task.name, 0, str(tmp_path / "out" / "a"))
    verify(tmp_path / "out" / "a")
    assert [path.suffix for path in sorted(tmp_path.glob("a-*"))] == [".json", ".log"]


def test_a_failure_comes_home_with_its_log_and_takes_no_bundle_away(task: Task, tmp_path: Path) -> None:
    brought_home(task, tmp_path, run_there(packed(task), _LIMITS))
    task.path.write_text(task.path.read_text(encoding="utf-8").replace(":good", ":crashes"), encoding="utf-8")
    ended = brought_home(task, tmp_path, run_there(packed(task), _LIMITS))
    assert ended.exit_code == 1
    assert ended.error is not None
    (log,) = tmp_path.glob("a-*.log")
    assert ended.error == f"it crashed by SIGSEGV\n  Its log: {log}"
    verify(tmp_path / "out" / "a")


def test_a_node_with_other_packages_is_refused_by_name(task: Task, tmp_path: Path) -> None:
    parcel = packed(task)
    other = replace(parcel, versions={**parcel.versions, "torch": "0.1"})
    ended = brought_home(task, tmp_path, run_there(other, _LIMITS))
    assert ended.exit_code == 2
    assert f"the node has torch {parcel.versions['torch']} in place of 0.1" in str(ended.error)


def test_what_a_worker_that_was_killed_has_left_goes(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # of a path that is short enough for a socket
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        killed, at_work = (Path(temporary, f"optexport-parcel-{name}") for name in ("killed", "at-work"))
        for each in (killed, at_work):
            (each / "files").mkdir(parents=True)
        with locked(at_work, wait=False):
            assert run_there(packed(task), _LIMITS).ended.error is None
        assert at_work.is_dir()
        assert not killed.exists()


def test_a_place_of_this_machine_does_not_travel(task: Task, tmp_path: Path) -> None:
    text = task.path.read_text(encoding="utf-8").replace('"../out/a"', f'"{tmp_path}/a"')
    task.path.write_text(text, encoding="utf-8")
    (absolute,) = tasks_of([str(task.path)])
    with pytest.raises(ConfigError, match="it is a place of this machine"):
        check_portable(absolute)


def test_a_folder_for_temporary_files_that_is_too_deep_for_a_socket_is_told(tmp_path: Path) -> None:
    """It was called a defect, and named no folder."""
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    script = f"import tempfile\ntempfile.tempdir = {str(deep)!r}\n"
    script += "from optexport.batch.supervisor import _started\n_started(print)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"ConfigError: {deep}: the path of the folder for temporary files is too long" in done.stderr
