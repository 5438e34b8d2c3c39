"""Batches: configs are isolated from each other, and every failure is reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

import optexport
from optexport import verify
from optexport.batch.engine import run_tasks
from optexport.batch.results import TaskResult, worst_exit_code
from optexport.batch.summary import BatchResult
from optexport.batch.tasks import Task, find_tasks
from optexport.cli.main import cli
from tests._helpers import stores
from tests.batch import fleets


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["batch", *arguments], catch_exceptions=False)


def document(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    summary = json.loads(result.stdout)
    assert summary["exit_code"] == result.exit_code
    assert summary["passed"] is (result.exit_code == 0)
    return {"rows": {row["config"]: row for row in summary["configs"]}, **summary}


@pytest.mark.slow
def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    """Python would put that folder first on the path of the processes that run the configs."""
    fleets.config(tmp_path, "a")
    here, program = tmp_path / "here", tmp_path / "bin" / "optexport"
    for name in ("torch", "onnx", "multiprocessing", "selectors"):
        (here / f"{name}.py").parent.mkdir(exist_ok=True)
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    program.parent.mkdir()
    program.write_text("from optexport.cli.main import main\nif __name__ == '__main__':\n    main()\n")
    command = [sys.executable, str(program), "batch", str(tmp_path / "a.toml")]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_crashes_and_memory_limits_do_not_affect_other_configs(tmp_path: Path) -> None:
    fleets.config(tmp_path, "good")
    for name in ("crashes", "eats"):
        fleets.config(tmp_path, name, name)
    (tmp_path / "wrong.toml").write_text("[modle]", encoding="utf-8")
    summary = document("*.toml", "--jobs", "2", "--memory", "2", "--retries", "0")
    codes = {name.removesuffix(".toml"): row["exit_code"] for name, row in summary["rows"].items()}
    assert codes == {"good": 0, "crashes": 1, "eats": 1, "wrong": 2}
    errors = {name.removesuffix(".toml"): row["error"] for name, row in summary["rows"].items()}
    assert errors["good"] is None
    assert "the process crashed with SIGSEGV" in errors["crashes"]
    assert "the process used more than 2.0 GiB of memory" in errors["eats"]
    assert 'modle: unknown table "modle". Did you mean "model"?' in errors["wrong"]
    assert summary["rows"]["good.toml"]["output"] == str(tmp_path / "out" / "good")
    verify(tmp_path / "out" / "good")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good"]
    assert summary["rows"]["eats.toml"]["peak_memory"] > 2 << 30
    assert summary["exit_code"] == 1


@pytest.mark.slow
def test_python_runs_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleets.config(tmp_path, "a")
    (tmp_path / "wrong.toml").write_text("[modle]", encoding="utf-8")
    result = optexport.run_batch(["*.toml"], jobs=2, retries=0, folder=tmp_path / "logs", progress=True)
    assert [item.exit_code for item in result.results] == [0, 2]
    assert (result.passed, result.exit_code) == (False, 2)
    assert repr(result) == "BatchResult(1 passed, 1 invalid config)"
    assert "1 passed, 1 invalid config" in result.summary()
    assert "a.toml: passed" in capsys.readouterr().err
    assert optexport.run_batch(tmp_path / "a.toml", folder=tmp_path / "logs", resume=True).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "batch: jobs: expected at least 1, found 0"),
        ({"timeout": "soon"}, 'batch: timeout: "soon" is not a duration'),
        ({"memory": float("nan")}, "batch: memory: "),
        ({"engine": "spark"}, 'batch: engine: expected "local" or "ray", found "spark"'),
        ({"engine": "ray", "jobs": 2}, "batch: jobs: a Ray cluster decides itself how many configs it runs"),
        ({"address": "auto"}, "batch: address: an address needs the engine ray"),
        ({"from_registry": "name = 'a'"}, "batch: from_registry: a registry needs exactly one config, found 2"),
    ],
)
def test_invalid_options_are_refused_before_any_run(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(optexport.ConfigError) as raised:
        optexport.run_batch(["a.toml", "b.toml"], **options)
    assert str(raised.value).startswith(message)
    assert not any(tmp_path.iterdir())


def test_a_batch_without_configs_is_refused() -> None:
    with pytest.raises(optexport.ConfigError, match="batch: configs: there is no config to run"):
        optexport.run_batch([])
    for wrong in (3, None, [3]):
        with pytest.raises(optexport.ConfigError, match="batch: configs: .* is not a path"):
            optexport.run_batch(wrong)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_crash_is_retried_and_a_reported_error_is_not(tmp_path: Path) -> None:
    fleets.config(tmp_path, "flaky", "crashes_once")
    (tmp_path / "wrong.toml").write_text("[modle]", encoding="utf-8")
    summary = document("flaky.toml", "wrong.toml", "--retries", "2")
    assert [(row["exit_code"], row["attempts"]) for row in summary["configs"]] == [(0, 2), (2, 1)]


@pytest.mark.slow
def test_resumed_batch_skips_finished_configs(tmp_path: Path) -> None:
    a, b = fleets.config(tmp_path, "a"), fleets.config(tmp_path, "b", "crashes")
    first = document("[ab].toml", "--retries", "0")
    assert [row["attempts"] for row in first["configs"]] == [1, 1]
    fleets.config(tmp_path, "b")
    written = (tmp_path / "out" / "a" / "measurements.json").read_bytes()
    with (tmp_path / "optexport-batch" / "journal.jsonl").open("a", encoding="utf-8") as journal:
        for odd in ('{"config": "a", "path": [], "digest": "x", "exit_code": 0}', '{"path": 1}', "[]", "null", "1"):
            journal.write(f"{odd}\n")  # not written by optexport
        journal.write('{"config": "a.toml", "exi')  # the machine crashed during the write
    second = document(str(a), str(b), "--resume")
    assert [row["attempts"] for row in second["configs"]] == [0, 1]
    assert second["exit_code"] == 0
    assert (tmp_path / "out" / "a" / "measurements.json").read_bytes() == written
    a.write_text(f"{a.read_text(encoding='utf-8')}\n# changed", encoding="utf-8")
    third = document("[ab].toml", "--resume")
    assert [row["attempts"] for row in third["configs"]] == [1, 0]
    fourth = call("[ab].toml", "--resume")
    assert fourth.exit_code == 0
    assert fourth.stdout.count("passed before") == 3  # one row per config, and the count
    assert "2 passed before" in fourth.stdout


@pytest.mark.nightly
def test_process_succeeds_only_with_a_result(tmp_path: Path) -> None:
    for name in ("leaves", "prints"):
        fleets.config(tmp_path, name, name)
    rows = document("leaves.toml", "prints.toml", "--retries", "0")["rows"]
    assert rows["leaves.toml"]["exit_code"] == 1
    assert "the process exited with 1 and wrote no result" in rows["leaves.toml"]["error"]
    assert (rows["prints.toml"]["exit_code"], rows["prints.toml"]["error"]) == (0, None)
    assert rows["prints.toml"]["output"] == str(tmp_path / "out" / "prints")


@pytest.mark.nightly
def test_processes_started_by_a_config_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    fleets.config(tmp_path, "moves", "leaves_its_session")
    row = document("moves.toml", "--retries", "0")["configs"][0]
    assert row["error"] is None
    assert not _is_alive(int((tmp_path / "moved").read_text(encoding="utf-8")))
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.nightly
def test_resume_repeats_configs_with_outdated_bundles(tmp_path: Path) -> None:
    path, out = fleets.config(tmp_path, "a"), tmp_path / "out" / "a"
    first = path.read_text(encoding="utf-8")
    wider = first.replace("[1, 8]", "[1, 16]")

    def it_failed_since() -> None:
        fleets.config(tmp_path, "a", "crashes")
        call("a.toml", "--retries", "0")
        path.write_text(first, encoding="utf-8")

    assert call("a.toml").exit_code == 0
    changes: dict[str, Callable[[], object]] = {
        "it failed since": it_failed_since,
        "a file is another": lambda: (out / "model.onnx").write_bytes(b"another"),
        "it is empty": lambda: [file.unlink() for file in out.iterdir()],
        "the config is another": lambda: path.write_text(wider, encoding="utf-8"),
    }
    for description, change in changes.items():
        change()
        assert [row["attempts"] for row in document("a.toml", "--resume")["configs"]] == [1], description
    assert [row["attempts"] for row in document("a.toml", "--resume")["configs"]] == [0]
    fleets.config(tmp_path, "b").write_text(first, encoding="utf-8")  # with the same output
    assert call("b.toml").exit_code == 0
    assert [row["attempts"] for row in document("a.toml", "--resume")["configs"]] == [1], "the bundle is another's"


@pytest.mark.slow
def test_bundle_contains_the_config_as_it_was_at_the_start(tmp_path: Path) -> None:
    path = fleets.config(tmp_path, "a", "changes_its_config")
    text = path.read_text(encoding="utf-8")
    assert call("a.toml", "--retries", "0").exit_code == 0
    assert path.read_text(encoding="utf-8") != text
    assert (tmp_path / "out" / "a" / "config.toml").read_text(encoding="utf-8") == text


@pytest.mark.nightly
def test_output_is_relative_to_the_link_of_a_config(tmp_path: Path) -> None:
    fleets.config(tmp_path, "a")
    (module,) = tmp_path.glob("fleet_*.py")
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "c.toml").symlink_to(tmp_path / "a.toml")
        (tmp_path / folder / module.name).symlink_to(module)
    summary = document("x/c.toml", "y/c.toml")
    assert [row["output"] for row in summary["configs"]] == [str(tmp_path / name / "out" / "a") for name in "xy"]


@pytest.mark.nightly
def test_logs_and_bundles_can_share_a_folder(tmp_path: Path) -> None:
    fleets.config(tmp_path, "a")
    assert call("a.toml", "--folder", "out", "--timeout", "600s", "--retries", "0").exit_code == 0


@pytest.mark.nightly
def test_very_long_config_name_is_accepted(tmp_path: Path) -> None:
    path = fleets.config(tmp_path, "a").rename(tmp_path / f"{'n' * 245}.toml")
    assert call(path.name, "--retries", "0").exit_code == 0
    assert call("n" * 300).exit_code == 2


def test_configs_run_and_the_exit_code_is_the_worst(tmp_path: Path) -> None:
    tight = fleets.config(tmp_path, "gated")
    tight.write_text(f"{tight.read_text(encoding='utf-8')}\n[gate]\nmax_size_mb = 0.000001\n", encoding="utf-8")
    (tmp_path / "wrong.toml").write_text("[modle]", encoding="utf-8")
    summary = document("gated.toml", "wrong.toml", "--jobs", "2")
    assert {name: row["exit_code"] for name, row in summary["rows"].items()} == {"gated.toml": 6, "wrong.toml": 2}
    assert summary["exit_code"] == 2


@pytest.mark.parametrize(("codes", "worst"), [([], 0), ([0, 0], 0), ([0, 7], 7), ([6, 2], 2), ([2, 3, 5, 4, 1], 1)])
def test_worst_exit_code_follows_the_documented_order(codes: list[int], worst: int) -> None:
    assert worst_exit_code(TaskResult("", "", "", code) for code in codes) == worst


@pytest.mark.slow
def test_usage_errors_are_reported_before_any_run(tmp_path: Path) -> None:
    fleets.config(tmp_path, "a")
    (tmp_path / "b.toml").write_text((tmp_path / "a.toml").read_text(encoding="utf-8"), encoding="utf-8")
    same = call("a.toml", "b.toml")
    assert same.exit_code == 2
    assert f"b.toml: export.output: a.toml has the same output, {tmp_path / 'out' / 'a'}" in same.output
    within = tmp_path / "b.toml"
    within.write_text(within.read_text(encoding="utf-8").replace('"out/a"', '"out/a/b"'), encoding="utf-8")
    assert "b.toml: export.output: the output is inside the bundle of a.toml" in call("a.toml", "b.toml").output
    nothing = call("c*.toml")
    assert nothing.exit_code == 2
    assert "c*.toml: no file matches this pattern" in nothing.output
    assert call("a.toml", "--timeout", "soon").exit_code == 2
    not_a_number = call("a.toml", "--memory", "nan")
    assert (not_a_number.exit_code, "batch: memory: " in not_a_number.output) == (2, True)
    for memory in ("0", "inf", "1e300", "1e-12"):
        nonsense = call("a.toml", "--memory", memory)
        assert nonsense.exit_code == 2
        assert "is not in the range 0.1<=x<=1048576" in nonsense.output
    assert not (tmp_path / "optexport-batch").exists()
    (tmp_path / "file").touch()
    folder = call("a.toml", "--folder", "file/batch")
    assert folder.exit_code == 2
    assert "--folder file/batch: the folder is not writable" in folder.output
    (tmp_path / "unwritable" / "journal.jsonl").mkdir(parents=True)
    assert call("a.toml", "--folder", "unwritable").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_pipes_and_devices_are_not_read(path: str) -> None:
    os.mkfifo("pipe")
    (task,) = find_tasks([path])
    assert (task.digest, task.config) == ("", None)


@pytest.mark.slow
def test_unwritable_journal_does_not_stop_the_batch(tmp_path: Path) -> None:
    tasks = find_tasks([str(fleets.config(tmp_path, name)) for name in ("a", "b")])

    def engine(tasks: Sequence[Task], folder: Path) -> Iterator[tuple[Task, TaskResult]]:
        journal = folder.with_name("journal.jsonl")
        journal.unlink()
        journal.mkdir()
        for task, code in zip(tasks, (0, 4), strict=True):
            yield task, TaskResult(task.name, str(task.path), task.digest, code, "another" if code else None)

    announced: list[TaskResult] = []
    results = run_tasks(tasks, engine, tmp_path / "batch", announce=announced.append)
    assert results == announced
    assert [result.exit_code for result in results] == [0, 4]
    assert str(results[0].error).startswith("The result is not in the journal, so a resumed batch runs ")
    assert str(results[1].error).startswith("another\n  The result is not in the journal")


@pytest.mark.slow
def test_mlflow_run_of_the_batch_is_the_parent_of_all_runs(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    for name, factory in (("a", "good"), ("b", "crashes_in_forward"), ("c", "eats_in_forward")):
        fleets.config(tmp_path, name, factory, f'uri = "{uri}"\nexperiment = "fleet"')
    summary = document("[abc].toml", "--memory", "2")
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("fleet").experiment_id
    runs = {run.info.run_id: run for run in client.search_runs([experiment])}
    parent = runs.pop(summary["mlflow_run_id"])
    assert (parent.info.status, parent.data.metrics["configs"], parent.data.metrics["failed"]) == ("FAILED", 3, 2)
    assert parent.data.tags["optexport.failure"] == "2 of 3 configs failed"
    table = mlflow.artifacts.load_dict(f"runs:/{parent.info.run_id}/batch.json")
    assert [row[table["columns"].index("result")] for row in table["data"]] == ["passed", "crashed", "out of memory"]
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert sorted(run.info.status for run in runs.values()) == ["FAILED", "FAILED", "FINISHED", "KILLED"]
    for name, status, reason in (
        ("b", "FAILED", "the process crashed with SIGSEGV"),
        ("c", "KILLED", "the process used more than 2.0 GiB"),
    ):
        row = summary["rows"][f"{name}.toml"]
        assert f"MLflow run {row['run_id']} was ended as {status}." in row["error"]
        assert runs[row["run_id"]].info.status == status
        assert runs[row["run_id"]].data.tags["optexport.failure"].startswith(reason)


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
    ],
)
def test_interrupted_batch_ends_all_its_processes(tmp_path: Path, temporary: Path, number: int, code: int) -> None:
    fleets.config(tmp_path, "hangs", "leaves_its_session_and_hangs")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    program = [sys.executable, "-m", "optexport", "batch", "hangs.toml"]
    with subprocess.Popen(
        program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 120
        while not ((tmp_path / "moved").exists() and (tmp_path / "moved").read_bytes()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.2)
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) >= 2  # the run, and the process that cleans up if the batch is killed
        pids.append(int((tmp_path / "moved").read_bytes()))
        second = call("hangs.toml")
        assert second.exit_code == 2
        assert "another batch uses this folder" in second.output
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert ("interrupted" in errors) is (number != signal.SIGKILL)
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not (tmp_path / "out" / "hangs").exists()
    while left := [path.name for path in temporary.iterdir()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_terminal_signal_at_the_start_gives_one_message(tmp_path: Path) -> None:
    fleets.config(tmp_path, "good")
    program = [sys.executable, "-m", "optexport", "batch", "good.toml"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while len(psutil.Process(process.pid).children()) < 2:  # the cleanup process and the run
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        message = process.communicate(timeout=60)[1]
    assert (process.returncode, message.splitlines()[-1]) == (130, "Error: interrupted")
    assert "Traceback" not in message


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_summary_has_the_page_of_the_batch_in_mlflow() -> None:
    page = "http://mlflow:5000/#/experiments/1/runs/abc?workflowType=machine_learning"
    assert page in BatchResult((), "abc", run_page=page).summary().splitlines()
