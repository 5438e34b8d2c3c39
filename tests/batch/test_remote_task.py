"""A config on a cluster node: its files are sent there, and its bundle is collected at the local output."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optexport import verify
from optexport.batch import ray_engine
from optexport.batch.ray_engine import RemoteTask, check_portable, collect, run_on_node, stage_tasks
from optexport.batch.results import TaskResult
from optexport.batch.supervisor import Limits
from optexport.batch.tasks import Task, find_tasks
from optexport.errors import ConfigError
from tests.batch import fleets

_LIMITS = Limits(4 << 30, 300.0, 0)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "configs"
    folder.mkdir()
    path = fleets.config(folder, "a")
    np.savez(tmp_path / "x.npz", input=np.ones((3, 4), dtype=np.float32))
    data = 'data = "../x.npz"\naxes.input = ["batch", "width"]'
    text = path.read_text(encoding="utf-8").replace('tensors.input.shape = ["batch", 4]', data)
    path.write_text(text.replace('"out/a"', '"../out/a"'), encoding="utf-8")
    (task,) = find_tasks([str(path)])
    return task


Run = Callable[[Task], TaskResult]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs a task in a copy of the staged files, as a node does, and collects the result."""

    def run(task: Task, change: Callable[[RemoteTask], RemoteTask] = lambda remote_task: remote_task) -> TaskResult:
        staged, node = tmp_path / "staged", tmp_path / "node"
        for folder in (staged, node):
            shutil.rmtree(folder, ignore_errors=True)
        staged.mkdir()
        ((_, remote_task),), failures = stage_tasks([task], staged)
        assert failures == []
        shutil.copytree(staged, node)  # follows links, as Ray does
        with monkeypatch.context() as context:
            context.chdir(node)
            result = run_on_node(change(remote_task), _LIMITS)
        assert not (node / "out" / "a").exists()
        return collect(task, tmp_path, result)

    return run


@pytest.mark.nightly
def test_outside_files_are_sent_and_bundle_is_collected(task: Task, run: Run, tmp_path: Path) -> None:
    result = run(task)
    assert result.error is None
    assert (result.config, result.exit_code, result.output) == (task.name, 0, str(tmp_path / "out" / "a"))
    verify(tmp_path / "out" / "a")
    assert [path.suffix for path in sorted(tmp_path.glob("a-*"))] == [".json", ".log"]


@pytest.mark.slow
def test_failure_has_a_log_and_removes_no_bundle(task: Task, run: Run, tmp_path: Path) -> None:
    run(task)
    task.path.write_text(task.path.read_text(encoding="utf-8").replace(":good", ":crashes"), encoding="utf-8")
    result = run(task)
    assert result.exit_code == 1
    (log,) = tmp_path.glob("a-*.log")
    assert result.error == f"the process crashed with SIGSEGV\n  Log: {log}"
    verify(tmp_path / "out" / "a")


def test_node_with_other_package_versions_is_refused(task: Task, run: Run) -> None:
    result = run(task, lambda remote_task: replace(remote_task, versions={**remote_task.versions, "torch": "0.1"}))
    assert result.exit_code == 2
    assert " (expected 0.1)" in str(result.error)
    assert str(result.error).startswith("the node has other package versions: torch ")


def test_absolute_output_is_refused(task: Task, tmp_path: Path) -> None:
    text = task.path.read_text(encoding="utf-8").replace('"../out/a"', f'"{tmp_path}/a"')
    task.path.write_text(text, encoding="utf-8")
    (absolute,) = find_tasks([str(task.path)])
    with pytest.raises(ConfigError, match="the output is an absolute path"):
        check_portable(absolute)


def test_files_too_large_for_ray_are_refused(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_MAX_PACKAGE_BYTES", 100)
    with pytest.raises(ConfigError, match=r"too large for Ray.*\n.*storage that every node can read"):
        stage_tasks([task], tmp_path / "staged")


def test_unreadable_task_does_not_stop_other_tasks(task: Task, tmp_path: Path) -> None:
    second = fleets.config(task.path.parent, "b")
    tasks = find_tasks([str(task.path), str(second)])
    task.path.unlink()
    remote_tasks, failures = stage_tasks(tasks, tmp_path / "staged")
    assert [remote_task.config for _, remote_task in remote_tasks] == ["b.toml"]
    assert [(failed.name, result.exit_code) for failed, result in failures] == [(str(task.path), 1)]
