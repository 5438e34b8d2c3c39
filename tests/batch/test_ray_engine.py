"""Batches on a Ray cluster: lost nodes, tracking, interrupts and usage errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optexport import verify
from optexport.cli.main import cli
from tests._helpers import stores
from tests.batch import fleets

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # warnings of Ray's own code


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OPTEXPORT_CACHE", "")  # no results of earlier runs, on any node
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def call(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["batch", *arguments, "--json"], catch_exceptions=False)
    summary = json.loads(result.stdout)
    assert summary["exit_code"] == result.exit_code
    return {row["config"]: row for row in summary["configs"]} | {"": summary}


def same(first: Path, second: Path) -> None:
    """Asserts that two bundles have the same files, except for files that differ between equal runs."""
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for name in names:
        if name.name not in ("measurements.json", "report.html"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_all_bundles_are_collected_after_a_node_is_lost(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = cluster.add_node(num_cpus=1)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    names = [f"model_{index}" for index in range(6)]
    for name in names:
        fleets.config(here, name)
    fleets.config(here, "crashes", "crashes")
    (here / "wrong.toml").write_text("[modle]", encoding="utf-8")
    shutil.copytree(here, there)
    monkeypatch.chdir(here)
    local = call("*.toml", "--retries", "0")
    monkeypatch.chdir(there)
    journal = there / "optexport-batch" / "journal.jsonl"

    def pull() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not (
            journal.exists() and "model_" in journal.read_text(encoding="utf-8")
        ):
            time.sleep(0.1)
        cluster.remove_node(second, allow_graceful=False)

    puller = threading.Thread(target=pull)
    puller.start()
    rows = call("*.toml", "--retries", "0", "--engine", "ray", "--address", cluster.address, "--memory", "1")
    puller.join()
    assert {name: row["exit_code"] for name, row in rows.items() if name} == {
        **{f"{name}.toml": 0 for name in names},
        "crashes.toml": 1,
        "wrong.toml": 2,
    }, rows
    assert {name: row["exit_code"] for name, row in rows.items()} == {n: r["exit_code"] for n, r in local.items()}
    for name in names:
        same(here / "out" / name, there / "out" / name)
        verify(there / "out" / name)
    assert sorted(path.name for path in (there / "out").iterdir()) == sorted(names)
    assert "the process crashed with SIGSEGV" in rows["crashes.toml"]["error"]
    logs = {path.name.rpartition("-")[0] for path in (there / "optexport-batch" / "logs").glob("*.log")}
    assert logs >= {*names, "crashes"}


def test_runs_are_tracked_by_the_driver(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uri = stores.store(tmp_path)
    fleets.config(tmp_path, "a", tracking='uri = "sqlite:///mlflow.db"\nexperiment = "fleet"')
    rows = call("a.toml", "--engine", "ray", "--address", cluster.address)
    assert rows[""]["exit_code"] == 0, rows
    import mlflow

    run = mlflow.MlflowClient(uri).get_run(rows["a.toml"]["run_id"])
    assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", rows[""]["mlflow_run_id"])


def test_interrupted_batch_leaves_no_files_on_the_nodes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    fleets.config(tmp_path, "hangs", "hangs")
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    environment["RAY_TMPDIR"] = "/tmp"  # Ray's socket paths must be short
    program = [sys.executable, "-m", "optexport", "batch", "hangs.toml", "--engine", "ray", "--memory", "1"]
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not list((tmp_path / "temporary").glob("optexport-batch-*")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "interrupted" in errors
    assert not list((tmp_path / "temporary").glob("optexport-*"))


def test_usage_errors_of_a_cluster_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    path = fleets.config(tmp_path, "a")
    unreachable = CliRunner().invoke(cli, ["batch", "a.toml", "--engine", "ray", "--address", "127.0.0.1:1"])
    assert unreachable.exit_code == 2, unreachable.output
    assert "--address 127.0.0.1:1: no Ray cluster answers" in unreachable.output
    path.write_text(path.read_text(encoding="utf-8").replace('"out/a"', f'"{tmp_path}/out"'), encoding="utf-8")
    absolute = CliRunner().invoke(cli, ["batch", "a.toml", "--engine", "ray"])
    assert absolute.exit_code == 2
    assert "a.toml: export.output: the output is an absolute path" in absolute.output
    jobs = CliRunner().invoke(cli, ["batch", "a.toml", "--engine", "ray", "--jobs", "2"])
    assert jobs.exit_code == 2
