"""Tests of ``optexport bench``: measurements, comparisons, and clean-up."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

import optexport
from optexport.bench import turns as racing
from optexport.bench.artifact import Artifact, file_size, open_artifacts
from optexport.bench.measure import choose_pairs, measure
from optexport.bench.report import as_json
from optexport.bench.run import bench
from optexport.bench.turns import Settings, Timing, race
from optexport.bench.worker import _sample
from optexport.bench.workload import Workload, other_sizes
from optexport.errors import BenchError, ConfigError
from optexport.exporters.format import Loader
from optexport.exporters.registry import get_format
from optexport.signature.signature import Dim
from tests._helpers import exports
from tests._helpers.cli import message
from tests.bench.files import WIDTH, chain, lookup
from tests.bench.running import BRIEF, call, workload


def document(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, *BRIEF, "--json")
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def write_inputs(folder: Path) -> Path:
    save_file({name: tensor.numpy() for name, tensor in exports.batch().items()}, folder / "in.safetensors")
    return folder / "in.safetensors"


# Measurements


@pytest.mark.slow
def test_file_with_far_more_work_is_slower(tmp_path: Path) -> None:
    few, many = chain(tmp_path / "few.onnx", 2), chain(tmp_path / "many.onnx", 200)
    report = bench([few, many], shapes=[{"batch": 4, "length": 32}], settings=Settings(rounds=12, seconds=0.01))
    (pair,) = report.comparisons
    assert (pair.artifact.path, pair.baseline.path) == (many, few)
    assert pair.comparison.verdict == "slower"
    assert pair.comparison.high < 0.5
    assert [figures.p50 <= figures.p90 <= figures.p99 for figures in report.figures] == [True, True]


@pytest.mark.slow
def test_bundle_is_measured_on_its_inputs_at_given_sizes() -> None:
    output = exports.exported().output
    read = document(output, "--shape", "batch=3")
    assert {artifact["format"] for artifact in read["artifacts"]} == {"onnx", "torchscript", "pt2"}
    assert all(artifact["proven"] and artifact["bytes"] > 0 for artifact in read["artifacts"])
    assert [(row["shape"], row["rows"]) for row in read["figures"]] == [("batch=3,sequence=5", 3)] * 3
    assert all(row["rows_per_second"] > 0 and row["load_seconds"] > 0 for row in read["figures"])
    pairs = [(pair["artifact"].split(": ")[1], pair["baseline"].split(": ")[1]) for pair in read["comparisons"]]
    assert pairs == [("onnx", "torchscript"), ("pt2", "torchscript")]
    read = document(output / "model.onnx", "--shape", "batch=3,sequence=7", "--shape", "sequence=2")
    assert [row["shape"] for row in read["figures"]] == ["batch=3,sequence=7", "batch=2,sequence=2"]


@pytest.mark.slow
def test_bundles_are_compared_in_one_format() -> None:
    output = exports.exported().output
    read = document(output, "--against", output, "--format", "onnx")
    (compared,) = read["comparisons"]
    assert (compared["artifact"], compared["baseline"]) == (f"{output}: onnx", f"{output}: onnx (2)")
    assert compared["low"] <= compared["speedup"] <= compared["high"]
    assert compared["verdict"] == "inconclusive"  # after two rounds


def test_file_in_a_bundle_is_an_artifact_of_the_bundle() -> None:
    output = exports.exported().output
    (artifact,) = open_artifacts(output / "model.pt2").artifacts
    assert (artifact.format, artifact.proven) == ("pt2", True)


def test_bare_file_is_unproven_and_lists_assumptions(tmp_path: Path) -> None:
    result = call(lookup(tmp_path / "lookup.onnx"), "--shape", "batch=2", *BRIEF)
    assert result.exit_code == 0, result.stderr
    assert "assumed sizes length=128" in result.stdout
    assert "random values 0 and 1 for ids" in result.stdout
    assert "Not part of a bundle, so never compared with a model" in result.stdout


def test_external_data_with_an_invalid_name_is_missing(tmp_path: Path) -> None:
    path = chain(tmp_path / "far.onnx", 1, external=True)
    path.write_bytes(path.read_bytes().replace(b"far.onnx.data", b"far.onnx\0data"))
    with pytest.raises(BenchError, match="the external data of the file is missing"):
        file_size(path, "onnx")


def test_size_includes_external_data(tmp_path: Path) -> None:
    path = chain(tmp_path / "far.onnx", 1, external=True)
    (artifact,) = open_artifacts(path).artifacts
    assert artifact.size == path.stat().st_size + (tmp_path / "far.onnx.data").stat().st_size
    assert artifact.size > 4 * WIDTH * WIDTH


def test_result_is_written_to_output(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    assert call(chain(tmp_path / "a.onnx", 1), *BRIEF, "--output", place).exit_code == 0
    assert json.loads(place.read_text())["figures"][0]["p50_ms"] > 0


@pytest.mark.slow
def test_output_replaces_only_earlier_results(tmp_path: Path) -> None:
    far = chain(tmp_path / "far.onnx", 1, external=True)
    save_file({"x": np.ones((4, 8, WIDTH), "float32")}, tmp_path / "in.safetensors")
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    places = [tmp_path / "far.onnx.data", tmp_path / "in.safetensors", bundle / "model.pt2", bundle / "new.json"]
    before = {place: place.read_bytes() for place in tmp_path.rglob("*") if place.is_file()}
    for place in places:
        model = far if place.parent == tmp_path else bundle / "model.onnx"
        error = message(call(model, *BRIEF, "--inputs", tmp_path / "in.safetensors", "--output", place), 2)
        assert (
            "the file exists and is not a benchmark result" in error
            or f"writing this path would change {bundle}" in error
        )
    assert {place: place.read_bytes() for place in tmp_path.rglob("*") if place.is_file()} == before
    again = ("--inputs", tmp_path / "in.safetensors", "--output", tmp_path / "found.json")
    assert [call(far, *BRIEF, *again).exit_code for _ in range(2)] == [0, 0]


def test_inputs_too_large_for_memory_are_an_error(tmp_path: Path) -> None:
    assert "do not fit" in message(call(chain(tmp_path / "a.onnx", 1), *BRIEF, "--shape", "batch=2147483647"), 2)


def test_rounds_are_rounded_up_to_whole_launches(tmp_path: Path) -> None:
    settings = Settings(rounds=3, seconds=0.01)
    assert settings.rounds == 4
    (timing,) = race([open_artifacts(chain(tmp_path / "a.onnx", 1)).artifacts[0]], [workload(tmp_path)], settings)
    assert sum(len(launch) for launch in timing.turns) == 4


@pytest.mark.slow
def test_bare_torch_files_need_inputs(tmp_path: Path) -> None:
    output = exports.exported().output
    for name in ("model.pt2", "model.torchscript.pt"):
        shutil.copy(output / name, tmp_path / name)
        assert "--inputs FILE.safetensors" in message(call(tmp_path / name), 2)
    inputs = write_inputs(tmp_path)
    read = document(tmp_path / "model.pt2", tmp_path / "model.torchscript.pt", "--inputs", inputs)
    assert [row["rows"] for row in read["figures"]] == [2, 2]


@pytest.mark.slow
def test_bfloat16_inputs_work_only_for_torch_files(tmp_path: Path) -> None:
    batch = {"input": torch.zeros(2, 4, dtype=torch.bfloat16)}
    program = torch.export.export(torch.nn.Linear(4, 4).bfloat16(), (), batch)
    torch.export.save(program, tmp_path / "half.pt2")
    inputs = tmp_path / "in.safetensors"
    save_torch_file(batch, inputs)
    assert document(tmp_path / "half.pt2", "--inputs", inputs)["figures"][0]["rows"] == 2
    error = message(call(chain(tmp_path / "a.onnx", 1), "--inputs", inputs, *BRIEF), 2)
    assert f"{tmp_path / 'a.onnx'} cannot receive input: NumPy has no dtype BF16" in error


@pytest.mark.slow
def test_different_formats_are_compared_with_the_first_file(tmp_path: Path) -> None:
    output = exports.exported().output
    for name in ("onnx", "pt2"):
        shutil.copy(output / f"model.{name}", tmp_path)
    read = document(tmp_path / "model.onnx", tmp_path / "model.pt2", "--inputs", write_inputs(tmp_path))
    (compared,) = read["comparisons"]
    assert (compared["artifact"], compared["baseline"]) == (str(tmp_path / "model.pt2"), str(tmp_path / "model.onnx"))
    assert compared["more_rounds"] is not None


def test_format_that_ignores_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "onnx: --threads may have no effect, because the format does not define prepare_benchmark."
    arguments = (exports.exported().output, "--format", "onnx", "--threads", "2")
    assert note not in document(*arguments)["notes"]
    monkeypatch.delattr(type(get_format("onnx")), "prepare_benchmark")
    assert note in document(*arguments)["notes"]


SERVED = """
import sys
from pathlib import Path
from types import SimpleNamespace
import optexport.bench.turns
import optexport.bench.worker
from optexport.exporters import Benchmark
from optexport.exporters.registry import get_format
benchmark = Benchmark(Path(sys.argv[1]), None, None, 1, "cpu")
run = get_format("onnx").prepare_benchmark(benchmark)(Path(sys.argv[2]))()
print([output.shape for output in run()], "torch" in sys.modules)
"""


def test_onnx_worker_does_not_import_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVED, chain(tmp_path / "a.onnx", 1), workload(tmp_path).file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[(4, 32, 64)] False\n"


def test_turns_are_shuffled_and_equally_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    artifacts = [Artifact(name, path, "onnx", 1) for name in "abc"]
    order: list[str] = []
    request = racing._Worker.request

    def watched(self: racing._Worker, order_name: str, argument: Any = None) -> Any:
        if order_name == "turn":
            order.append(self.artifact.name)
        return request(self, order_name, argument)

    monkeypatch.setattr(racing._Worker, "request", watched)
    timings = race(artifacts, [workload(tmp_path)], Settings(rounds=5, seconds=0.001))
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(names) == list("abc") for names in rounds)
    assert len(set(rounds)) > 1
    assert [np.shape(timing.medians) for timing in timings] == [(3, 2)] * 3, "restarted every second round"


@pytest.mark.slow
def test_process_serves_all_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shapes = chain(tmp_path / "a.onnx", 1), []
    for sequence in (3, 200):
        (tmp_path / str(sequence)).mkdir()
        shapes.append(workload(tmp_path / str(sequence), sequence))
    started = []
    start_worker = racing._start_worker

    def watched(artifact: Artifact, threads: int) -> Any:
        started.append(artifact.name)
        return start_worker(artifact, threads)

    monkeypatch.setattr(racing, "_start_worker", watched)
    artifacts = [Artifact(name, path, "onnx", 1) for name in "ab"]
    timings = race(artifacts, shapes, Settings(rounds=4, seconds=0.01))
    assert started == list("abab")
    order = [(timing.workload.sizes["length"], timing.artifact.name) for timing in timings]
    assert order == [(3, "a"), (3, "b"), (200, "a"), (200, "b")]
    assert all(np.shape(timing.medians) == (2, 2) for timing in timings)
    few, many = (np.median(timing.medians) for timing in (timings[0], timings[2]))
    assert many > 4 * few, "each is measured on its own inputs"


@pytest.mark.slow
def test_turn_has_three_calls_or_a_very_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call(seconds: float) -> None:
        nonlocal now
        now += seconds

    # A fake clock: on a busy machine, sleep takes longer than its argument.
    monkeypatch.setattr("optexport.bench.worker.time", SimpleNamespace(perf_counter=lambda: now))
    assert len(_sample(lambda: call(0.03), seconds=0.05)) == 3
    assert len(_sample(lambda: call(0.6), seconds=0.05)) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_failing_call_leaves_garbage_collection_as_it_was(enabled: bool) -> None:
    def fail() -> None:
        raise ValueError("failed")

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="failed"):
            _sample(fail, seconds=0.0)
        assert gc.isenabled() is enabled
        _sample(lambda: None, seconds=0.0)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize(
    ("formats", "baselines", "pairs"),
    [
        ("onnx", "", []),
        ("onnx pt2", "", [(1, 0)]),
        ("onnx pt2 onnx pt2", "", [(1, 0), (2, 0), (3, 1)]),
        ("onnx pt2", "pt2 onnx", [(0, "b1"), (1, "b0")]),
        ("onnx", "pt2", [(0, "b0")]),
        ("onnx", "onnx onnx", [(0, "b0"), (0, "b1")]),
    ],
)
def test_pairs_have_equal_formats_if_possible(formats: str, baselines: str, pairs: list[tuple[int, Any]]) -> None:
    artifacts = [Artifact(str(index), Path(), name, 1) for index, name in enumerate(formats.split())]
    baseline_artifacts = [Artifact(f"b{index}", Path(), name, 1) for index, name in enumerate(baselines.split())]
    names = [(artifact.name, baseline.name) for artifact, baseline in choose_pairs(artifacts, baseline_artifacts)]
    assert names == [(str(artifact), str(baseline)) for artifact, baseline in pairs]


def test_a_model_of_this_process_takes_turns_with_files(tmp_path: Path) -> None:
    calls: list[Path] = []

    def prepare(inputs: Path) -> Loader:
        return lambda: lambda: calls.append(inputs)

    model = Artifact("PyTorch", Path(), "PyTorch", 1, prepare=prepare)
    file = Artifact("file", chain(tmp_path / "a.onnx", 1), "onnx", 1)
    report = measure([model, file], [workload(tmp_path)], [(file, model)], Settings(rounds=8, seconds=0.001))
    (pair,) = report.comparisons
    assert (pair.artifact, pair.baseline, pair.comparison.rounds) == (file, model, 8)
    assert as_json(report)["rounds"] == 8
    assert set(calls) == {workload(tmp_path).file}
    figures = report.figures[0]
    assert (figures.artifact, figures.load, figures.peak_memory) == (model, 0.0, None)
    table = report.summary()
    assert "speedups are over PyTorch." in table
    assert "never compared with a model: file\n" in table


def test_a_model_of_this_process_that_fails_is_named(tmp_path: Path) -> None:
    def prepare(inputs: Path) -> Loader:
        raise ValueError("no such size")

    model = Artifact("PyTorch", Path(), "PyTorch", 1, prepare=prepare)
    with pytest.raises(BenchError, match="PyTorch: cannot run the model: ValueError: no such size"):
        measure([model], [workload(tmp_path)], [], Settings(rounds=2, seconds=0.001))


def test_processes_restart_less_often_if_only_formats_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, launches = chain(tmp_path / "a.onnx", 1), []

    def watched(artifacts: Sequence[Artifact], workloads: Sequence[Workload], settings: Settings) -> list[Timing]:
        launches.append(settings.launches)
        return race(artifacts, workloads, replace(settings, rounds=2, rounds_per_launch=2))

    monkeypatch.setattr("optexport.bench.measure.race", watched)
    onnx, same, other = Artifact("a", path, "onnx", 1), Artifact("b", path, "onnx", 1), Artifact("c", path, "onnx", 1)
    other = replace(other, prepare=lambda inputs: lambda: lambda: None, format="PyTorch")
    measure([onnx, same], [workload(tmp_path)], [(onnx, same)], Settings(rounds=20, seconds=0.001))
    report = measure([onnx, other], [workload(tmp_path)], [(onnx, other)], Settings(rounds=20, seconds=0.001))
    assert launches == [10, 4]
    assert (report.settings.rounds, as_json(report)["rounds"]) == (20, 2)  # as measured


def test_file_of_fixed_shape_is_not_measured_at_others(tmp_path: Path) -> None:
    fixed = Artifact("fixed", chain(tmp_path / "a.onnx", 1), "onnx", 1, fixed=True)
    report = measure([fixed], [workload(tmp_path)], [], Settings(rounds=2, seconds=0.001))
    assert report.figures == ()
    assert report.notes == ("fixed: not measured at batch=4,length=32, its shape is fixed",)


# Clean-up


def workers(of: Path) -> list[int]:
    """Returns the processes whose environment names a folder."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(of) in (entry / "environ").read_text(errors="replace"):
                pids.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in pids if pid != os.getpid()]


@pytest.mark.sample(0, 1)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_leaves_no_process(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    program = subprocess.Popen(
        [sys.executable, "-m", "optexport", "bench", path, path, "--seconds", "60"],
        env={**os.environ, "OPTEXPORT_TEST": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 300
        while len(workers(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(workers(tmp_path)) == 3, "the program and two workers"
        program.send_signal(sent)
        _, stderr = program.communicate(timeout=300)
    finally:
        program.kill()
    assert program.returncode == code
    assert stderr.endswith("Error: interrupted\n")
    assert workers(tmp_path) == []


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    path = chain(tmp_path / "a.onnx", 1)
    program = subprocess.Popen(
        [sys.executable, "-m", "optexport", "bench", path, path, "--seconds", "1"],
        env={**os.environ, "OPTEXPORT_TEST": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while len(workers(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    program.kill()
    program.wait()
    while workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers(tmp_path) == []


@pytest.mark.slow
def test_benchmark_does_not_change_torch_settings(tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.is_grad_enabled()
    document(exports.exported().output, "--threads", "2", "--format", "torchscript")
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before


def test_size_includes_external_data_of_subgraphs(tmp_path: Path) -> None:
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
    (artifact,) = open_artifacts(path).artifacts
    assert artifact.size == path.stat().st_size + 4 * 64 * 64


def test_race_ends_before_its_deadline(tmp_path: Path) -> None:
    artifacts = [open_artifacts(chain(tmp_path / f"{name}.onnx", 1)).artifacts[0] for name in "ab"]
    settings = Settings(rounds=9, seconds=0.001, rounds_per_launch=3, deadline=time.monotonic())
    (first, second) = race(artifacts, [workload(tmp_path)], settings)
    assert [len(launch) for launch in first.turns] == [len(launch) for launch in second.turns] == [3]


_DIMS = st.builds(
    lambda low, more, size, step: (Dim("x", low * step, (low + more) * step, step), (low + min(size, more)) * step),
    st.integers(1, 9), st.integers(0, 99), st.integers(0, 99), st.sampled_from([1, 8]),
)  # fmt: skip


@given(axes=st.lists(_DIMS, max_size=3))
def test_small_and_large_sizes_are_allowed_and_differ(axes: list[tuple[Dim, int]]) -> None:
    dims, traced = {str(i): dim for i, (dim, _) in enumerate(axes)}, {str(i): size for i, (_, size) in enumerate(axes)}
    shapes = other_sizes(traced, dims)
    assert all(size in dims[name] for shape in shapes for name, size in shape.items())
    assert len({tuple(shape.values()) for shape in (traced, *shapes)}) == 1 + len(shapes) <= 3
    assert all(math.prod(shape.values()) <= 8.01 * math.prod(traced.values()) * 2 ** len(traced) for shape in shapes)


def test_small_and_large_sizes_of_texts() -> None:
    dims = {"batch": Dim("batch", 1, 64), "sequence": Dim("sequence", 2, 40)}
    assert other_sizes({"batch": 4, "sequence": 19}, dims) == [
        {"batch": 1, "sequence": 7},
        {"batch": 11, "sequence": 40},
    ]
    assert other_sizes({}, {}) == []
    assert other_sizes({"batch": 1}, {"batch": Dim("batch")}) == [{"batch": 8}]


@pytest.mark.slow
def test_python_function_gives_the_report_of_the_command() -> None:
    output = exports.exported().output
    sizes = {"batch": 3, "sequence": 7}
    report = optexport.benchmark(output, against=output, shapes=sizes, formats="onnx", rounds=2, seconds=0.001)
    read = document(output, "--against", output, "--format", "onnx", "--shape", "batch=3,sequence=7")
    measured = as_json(report)
    for key in ("threads", "rounds", "artifacts", "notes"):
        assert measured[key] == read[key]
    assert [row["sizes"] for row in measured["figures"]] == [sizes] * 2
    assert repr(report) == f"Report({output}: onnx, {output}: onnx (2); 1 inconclusive)"
    assert "p50 ms" in report.summary()
    assert "p50 ms" in report._repr_html_()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": "missing"}, "paths: missing: the path does not exist"),
        ({"paths": []}, "paths: there is nothing to measure"),
        ({"against": 3}, "against"),
        ({"shapes": {"batch": 0}}, "benchmark: shapes"),
        ({"rounds": 0}, "benchmark: rounds"),
        ({"seconds": math.nan}, "benchmark: seconds"),
        ({"formats": 5}, "benchmark: formats: 5 is not a text or a list of texts"),
        ({"formats": "onx"}, 'benchmark: formats: unknown format "onx"\n.*Did you mean "onnx"'),
    ],
)
def test_python_function_checks_its_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        optexport.benchmark(**{"paths": tmp_path} | options)
