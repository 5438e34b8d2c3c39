"""``optexport bench``: what it measures, how it compares, and that it leaves no process behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from optexport.bench import turns as racing
from optexport.bench.artifact import Artifact, file_size, open_target
from optexport.bench.command import bench
from optexport.bench.measure import measure, pairs_of
from optexport.bench.turns import Settings, race
from optexport.bench.worker import _samples
from optexport.errors import BenchError
from tests._helpers import exports
from tests._helpers.cli import message
from tests.bench.files import WIDTH, chain, lookup
from tests.bench.running import BRIEF, call, workload


def document(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, *BRIEF, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def given_inputs(folder: Path) -> Path:
    save_file({name: tensor.numpy() for name, tensor in exports.batch().items()}, folder / "in.safetensors")
    return folder / "in.safetensors"


# What it measures


def test_a_file_that_does_far_more_is_told_slower(tmp_path: Path) -> None:
    few, many = chain(tmp_path / "few.onnx", 2), chain(tmp_path / "many.onnx", 200)
    report = bench([few, many], shapes=[{"batch": 4, "length": 32}], settings=Settings(rounds=12, seconds=0.01))
    (duel,) = report.duels
    assert (duel.artifact.path, duel.baseline.path) == (many, few)
    assert duel.comparison.verdict == "slower"
    assert duel.comparison.high < 0.5
    assert [figures.p50 <= figures.p90 <= figures.p99 for figures in report.figures] == [True, True]


def test_every_file_of_a_bundle_is_measured_on_its_own_inputs_at_the_asked_sizes() -> None:
    output = exports.exported().output
    read = document(output, "--shape", "batch=3")
    assert {artifact["format"] for artifact in read["artifacts"]} == {"onnx", "torchscript", "pt2"}
    assert all(artifact["proven"] and artifact["bytes"] > 0 for artifact in read["artifacts"])
    assert [(row["shape"], row["rows"]) for row in read["figures"]] == [("batch=3,sequence=5", 3)] * 3
    assert all(row["rows_per_second"] > 0 and row["load_seconds"] > 0 for row in read["figures"])
    assert read["comparisons"] == []
    read = document(output / "model.onnx", "--shape", "batch=3,sequence=7", "--shape", "sequence=2")
    assert [row["shape"] for row in read["figures"]] == ["batch=3,sequence=7", "batch=2,sequence=2"]


def test_one_format_of_one_bundle_is_compared_with_another_bundle_of_the_same() -> None:
    output = exports.exported().output
    read = document(output, "--against", output, "--format", "onnx")
    (compared,) = read["comparisons"]
    assert (compared["artifact"], compared["baseline"]) == (f"{output}: onnx", f"{output}: onnx (2)")
    assert compared["low"] <= compared["speedup"] <= compared["high"]
    assert compared["verdict"] == "cannot tell"  # of two rounds nothing can be told


def test_a_file_beside_its_manifest_is_that_of_the_bundle() -> None:
    output = exports.exported().output
    (artifact,) = open_target(output / "model.pt2").artifacts
    assert (artifact.format, artifact.proven) == ("pt2", True)


def test_a_bare_file_is_not_called_proven_and_what_was_made_up_is_told(tmp_path: Path) -> None:
    result = call(lookup(tmp_path / "lookup.onnx"), "--shape", "batch=2", *BRIEF)
    assert result.exit_code == 0, result.stderr
    assert "nobody said what length is: 128" in result.stdout
    assert "ids are 0 and 1 at random" in result.stdout
    assert "Not proven to compute what a model computes" in result.stdout


def test_weights_in_what_is_no_name_of_a_file_are_missing(tmp_path: Path) -> None:
    path = chain(tmp_path / "far.onnx", 1, external=True)
    path.write_bytes(path.read_bytes().replace(b"far.onnx.data", b"far.onnx\0data"))
    with pytest.raises(BenchError, match="it lacks its weights"):
        file_size(path, "onnx")


def test_external_weights_are_part_of_the_size(tmp_path: Path) -> None:
    path = chain(tmp_path / "far.onnx", 1, external=True)
    (artifact,) = open_target(path).artifacts
    assert artifact.size == path.stat().st_size + (tmp_path / "far.onnx.data").stat().st_size
    assert artifact.size > 4 * WIDTH * WIDTH


def test_the_result_is_written_where_asked(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    assert call(chain(tmp_path / "a.onnx", 1), *BRIEF, "--output", place).exit_code == 0
    assert json.loads(place.read_text())["figures"][0]["p50_ms"] > 0


def test_what_is_no_earlier_result_is_not_written_over(tmp_path: Path) -> None:
    far = chain(tmp_path / "far.onnx", 1, external=True)
    save_file({"x": np.ones((4, 8, WIDTH), "float32")}, tmp_path / "in.safetensors")
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    places = [tmp_path / "far.onnx.data", tmp_path / "in.safetensors", bundle / "model.pt2", bundle / "new.json"]
    before = {place: place.read_bytes() for place in tmp_path.rglob("*") if place.is_file()}
    for place in places:
        given = far if place.parent == tmp_path else bundle / "model.onnx"
        told = message(call(given, *BRIEF, "--inputs", tmp_path / "in.safetensors", "--output", place), 2)
        assert "it exists and holds no measurements" in told or f"it would change {bundle}" in told
    assert {place: place.read_bytes() for place in tmp_path.rglob("*") if place.is_file()} == before
    again = ("--inputs", tmp_path / "in.safetensors", "--output", tmp_path / "found.json")
    assert [call(far, *BRIEF, *again).exit_code for _ in range(2)] == [0, 0]


def test_inputs_that_memory_does_not_hold_are_one_clear_message(tmp_path: Path) -> None:
    assert "do not fit" in message(call(chain(tmp_path / "a.onnx", 1), *BRIEF, "--shape", "batch=2147483647"), 2)


def test_the_rounds_that_are_told_are_those_that_are_run(tmp_path: Path) -> None:
    settings = Settings(rounds=3, seconds=0.01)
    assert settings.rounds == 4
    (timing,) = race([open_target(chain(tmp_path / "a.onnx", 1)).artifacts[0]], [workload(tmp_path)], settings)
    assert sum(len(launch) for launch in timing.turns) == 4


def test_torch_files_of_no_bundle_are_measured_on_given_inputs(tmp_path: Path) -> None:
    output = exports.exported().output
    for name in ("model.pt2", "model.torchscript.pt"):
        shutil.copy(output / name, tmp_path / name)
        assert "--inputs FILE.safetensors" in message(call(tmp_path / name), 2)
    given = given_inputs(tmp_path)
    read = document(tmp_path / "model.pt2", tmp_path / "model.torchscript.pt", "--inputs", given)
    assert [row["rows"] for row in read["figures"]] == [2, 2]


def test_inputs_in_bfloat16_are_for_files_of_torch(tmp_path: Path) -> None:
    batch = {"input": torch.zeros(2, 4, dtype=torch.bfloat16)}
    program = torch.export.export(torch.nn.Linear(4, 4).bfloat16(), (), batch)
    torch.export.save(program, tmp_path / "half.pt2")
    given = tmp_path / "in.safetensors"
    save_torch_file(batch, given)
    assert document(tmp_path / "half.pt2", "--inputs", given)["figures"][0]["rows"] == 2
    told = message(call(chain(tmp_path / "a.onnx", 1), "--inputs", given, *BRIEF), 2)
    assert f"input is of BF16, which {tmp_path / 'a.onnx'} cannot be given" in told


def test_files_of_different_formats_are_not_compared_and_it_says_so(tmp_path: Path) -> None:
    output = exports.exported().output
    for name in ("onnx", "pt2"):
        shutil.copy(output / f"model.{name}", tmp_path)
    read = document(tmp_path / "model.onnx", tmp_path / "model.pt2", "--inputs", given_inputs(tmp_path))
    assert read["comparisons"] == []
    assert any("are compared where one of them is given by --against" in note for note in read["notes"])


SERVED = """
import sys
from pathlib import Path
import optexport.bench.race
from optexport.bench.worker import Task, _onnx
run = _onnx(Task(Path(sys.argv[1]), "onnx", None, 1, "cpu"))(Path(sys.argv[2]))()
print([output.shape for output in run()], "torch" in sys.modules)
"""


def test_a_worker_of_an_onnx_file_imports_no_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVED, chain(tmp_path / "a.onnx", 1), workload(tmp_path).file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[(4, 32, 64)] False\n"


def test_the_order_of_turns_changes_and_everyone_has_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    artifacts = [Artifact(name, path, "onnx", 1) for name in "abc"]
    order: list[str] = []
    ask = racing._Worker.ask

    def watched(self: racing._Worker, what: str, given: Any = None) -> Any:
        if what == "turn":
            order.append(self.artifact.name)
        return ask(self, what, given)

    monkeypatch.setattr(racing._Worker, "ask", watched)
    timings = race(artifacts, [workload(tmp_path)], Settings(rounds=5, seconds=0.001))
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 1
    assert [np.shape(timing.medians) for timing in timings] == [(3, 2)] * 3, "started afresh every second round"


def test_a_process_serves_one_workload_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shapes = chain(tmp_path / "a.onnx", 1), []
    for sequence in (3, 200):
        (tmp_path / str(sequence)).mkdir()
        shapes.append(workload(tmp_path / str(sequence), sequence))
    started = []
    working = racing._working

    def watched(artifact: Artifact, threads: int) -> Any:
        started.append(artifact.name)
        return working(artifact, threads)

    monkeypatch.setattr(racing, "_working", watched)
    artifacts = [Artifact(name, path, "onnx", 1) for name in "ab"]
    timings = race(artifacts, shapes, Settings(rounds=4, seconds=0.01))
    assert started == list("abab")
    told = [(timing.workload.sizes["length"], timing.artifact.name) for timing in timings]
    assert told == [(3, "a"), (3, "b"), (200, "a"), (200, "b")]
    assert all(np.shape(timing.medians) == (2, 2) for timing in timings)
    few, many = (np.median(timing.medians) for timing in (timings[0], timings[2]))
    assert many > 4 * few, "each is measured on its own inputs"


def test_a_turn_has_three_calls_or_one_that_takes_very_long() -> None:
    assert len(_samples(lambda: time.sleep(0.03), seconds=0.05)) == 3
    assert len(_samples(lambda: time.sleep(0.6), seconds=0.05)) == 1


@pytest.mark.parametrize(
    ("formats", "baselines", "pairs"),
    [
        ("onnx pt2", "", []),
        ("onnx pt2 onnx onnx", "", [(2, 0), (3, 0)]),
        ("onnx pt2", "pt2 onnx", [(0, "b1"), (1, "b0")]),
        ("onnx", "pt2", [(0, "b0")]),
        ("onnx", "onnx onnx", [(0, "b0"), (0, "b1")]),
    ],
)
def test_like_is_compared_with_like(formats: str, baselines: str, pairs: list[tuple[int, Any]]) -> None:
    artifacts = [Artifact(str(index), Path(), name, 1) for index, name in enumerate(formats.split())]
    others = [Artifact(f"b{index}", Path(), name, 1) for index, name in enumerate(baselines.split())]
    found = [(ours.name, theirs.name) for ours, theirs in pairs_of(artifacts, others)]
    assert found == [(str(one), str(other)) for one, other in pairs]


def test_a_file_of_fixed_shape_is_measured_at_no_other(tmp_path: Path) -> None:
    fixed = Artifact("fixed", chain(tmp_path / "a.onnx", 1), "onnx", 1, fixed=True)
    report = measure([fixed], [workload(tmp_path)], [], Settings(rounds=2, seconds=0.001))
    assert report.figures == ()
    assert report.notes == ("fixed: not at batch=4,length=32, since its shape is fixed",)


# What it leaves


def workers(of: Path) -> list[int]:
    """The processes that have a file of a folder open for them to measure."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(of) in (entry / "environ").read_text(errors="replace"):
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_behind(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    program = subprocess.Popen(
        [sys.executable, "-m", "optexport", "bench", path, path, "--seconds", "60"],
        env={**os.environ, "OPTEXPORT_TEST": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(workers(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(workers(tmp_path)) == 3, "the program and two workers"
        program.send_signal(sent)
        _, told = program.communicate(timeout=30)
    finally:
        program.kill()
    assert program.returncode == code
    assert told.endswith("Error: interrupted\n")
    assert workers(tmp_path) == []


def test_the_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    program = subprocess.Popen(
        [sys.executable, "-m", "optexport", "bench", path, path, "--seconds", "1"],
        env={**os.environ, "OPTEXPORT_TEST": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(workers(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    program.kill()
    program.wait()
    while workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers(tmp_path) == []


def test_measuring_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.is_grad_enabled()
    document(exports.exported().output, "--threads", "2", "--format", "torchscript")
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before


def test_the_weights_of_inner_graphs_are_counted_too(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((64, 64), "float32"), "inner")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="inner.data")
    weight.ClearField("raw_data")
    (tmp_path / "inner.data").write_bytes(bytes(4 * 64 * 64))
    flag, out = helper.make_tensor_value_info("flag", TensorProto.BOOL, []), [64, 64]
    variants = {
        name: helper.make_graph(
            [helper.make_node("Identity", ["inner"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, out)],
            [weight],
        )
        for name in ("then_branch", "else_branch")
    }
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, out)
    graph = helper.make_graph([helper.make_node("If", ["flag"], ["y"], **variants)], "choice", [flag], [result])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    (artifact,) = open_target(path).artifacts
    assert artifact.size == path.stat().st_size + 4 * 64 * 64
