"""Tests of tuning within a run."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import fx, nn

from optexport._utils.progress import Progress
from optexport.bench.artifact import Artifact
from optexport.bench.gates import check_never_slower
from optexport.bench.report import PairwiseComparison, Report
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.bundle import digests
from optexport.bundle.outcomes import Comparison
from optexport.bundle.parity_records import ParityRecord
from optexport.cli.main import cli
from optexport.config.load import load_config
from optexport.config.schema import PrecisionConfig
from optexport.errors import ConfigError, GateError
from optexport.job import Job
from optexport.parity.gates import load_metrics
from optexport.pipeline.reproduce import reproduce
from optexport.pipeline.rules import load_rules
from optexport.pipeline.run import run
from optexport.report.result import Result
from optexport.tuning import tuner
from tests._helpers.exports import INPUTS

_RULES = """
import operator

from optexport.transformations import Transformation


class _After(Transformation):
    preserves_computation = True

    def transform(self, graph_module):
        norm = next(n for n in graph_module.graph.nodes if n.op == "call_module" and "norm" in n.target)
        users, value = list(norm.users), norm
        for function, number in self.steps:
            with graph_module.graph.inserting_after(value):
                value = graph_module.graph.call_function(function, (value, number))
        for user in users:
            user.replace_input_with(norm, value)
        return graph_module


class Slows(_After):
    steps = [(operator.mul, 2.0), (operator.mul, 0.5)] * 100


class Breaks(_After):
    steps = [(operator.add, 0.5)]
"""

_CONFIG = f"""
[model]
source = "python:tests._helpers.exports:block"
{INPUTS}
[[transformations]]
use = "python:rules_of_mine:Slows"
[[transformations]]
use = "python:rules_of_mine:Breaks"
[export]
formats = ["onnx"]
passes = {{ onnx = [] }}
[bench]
rounds = 12
shapes = [{{ batch = 3, sequence = 6 }}]
[tune]
budget = "3m"
[tracking]
enabled = false
"""


def _write(folder: Path, text: str = _CONFIG) -> Path:
    (folder / "rules_of_mine.py").write_text(_RULES, encoding="utf-8")
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuner")


@pytest.fixture(scope="module")
def notes() -> list[str]:
    """The lines that the run of `result` prints besides its steps."""
    return []


@pytest.fixture(scope="module")
def result(folder: Path, notes: list[str]) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTEXPORT_CACHE", str(folder / "cache"))
        return run(_write(folder), progress=Progress(note=notes.append))


@pytest.mark.slow
def test_slow_rule_is_dropped_and_broken_rule_refused(result: Result) -> None:
    (outcome,) = result.tuned
    assert outcome.chosen.rules == ()
    assert result.manifest.transformations == []
    reasons = {trial.change: trial.refused or "" for trial in outcome.trials}
    assert reasons["as configured"].startswith("parity failed for graph: hidden at traced")
    slowed = next(trial for trial in outcome.trials if trial.change == "without python:rules_of_mine:Breaks")
    assert slowed.refused is None


@pytest.mark.slow
@pytest.mark.usefixtures("result")
def test_budget_and_its_estimate_are_printed(notes: list[str]) -> None:
    (note,) = notes
    assert re.fullmatch(r"tune: budget 3m: about \d+ candidates?", note)


@pytest.mark.slow
def test_tuned_run_compares_its_files_only_in_the_search(result: Result) -> None:
    (outcome,) = result.tuned
    assert outcome.shapes == ("batch=3,sequence=6",)
    assert outcome.untried == ()
    assert result.bench is None


@pytest.mark.slow
def test_file_of_the_search_is_not_exported_again(result: Result) -> None:
    assert "export onnx" in result.cache_hits


@pytest.mark.nightly
def test_budget_includes_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for the search alone would take the time of a run without a search in addition."""
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    text = _CONFIG.replace('use = "python:rules_of_mine:Breaks"', 'use = "merge-linears"')

    def timed(budget: int) -> tuple[float, list[str]]:
        notes: list[str] = []
        start = time.monotonic()
        assert run(_write(tmp_path, text.replace('"3m"', f'"{budget}s"')), progress=Progress(note=notes.append)).passed
        return time.monotonic() - start, notes

    without_search, _ = timed(1)
    budget = round(2 * without_search) + 20
    seconds, (note,) = timed(budget)
    assert seconds < budget + without_search / 2
    # On a machine that becomes slower meanwhile, there is no time for candidates.
    assert re.fullmatch(rf"tune: budget {budget}s: (about \d+ candidates?|no time for candidates, .*)", note)


@pytest.mark.slow
def test_run_without_time_to_tune_has_the_configured_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    notes: list[str] = []
    text = _CONFIG.replace('"3m"', '"1s"').replace('use = "python:rules_of_mine:Breaks"', 'use = "merge-linears"')
    result = run(_write(tmp_path, text), progress=Progress(note=notes.append))
    assert notes == ["tune: budget 1s: no time for candidates, the files stay as configured"]
    (outcome,) = result.tuned
    assert outcome.chosen.change == "as configured"
    assert outcome.untried_text.startswith("0 of ")
    assert "python:rules_of_mine:Slows" in {rule.rule for rule in result.manifest.transformations}


@pytest.mark.slow
def test_trials_are_in_measurements_and_choice_in_manifest(result: Result) -> None:
    (tuned,) = json.loads((result.output / "measurements.json").read_text())["tune"]
    assert tuned["chosen"]["rules"] == []
    assert {trial["change"] for trial in tuned["trials"]} >= {"plain export", "as configured"}
    manifest = digests.read_manifest(result.output)
    assert manifest.config["transformations"] == []
    assert "tune" not in manifest.config
    (artifact,) = manifest.artifacts
    assert artifact.passes == list(tuned["chosen"]["passes"])


@pytest.mark.slow
def test_config_of_the_choice_gives_the_same_file(result: Result, tmp_path: Path) -> None:
    lowered = json.dumps(result.manifest.artifacts[0].passes)
    head, _, _ = _CONFIG.partition("[[transformations]]")
    text = f"""transformations = []
{head}
[export]
formats = ["onnx"]
[export.passes]
onnx = {lowered}
[tracking]
enabled = false
"""
    again = run(_write(tmp_path, text))
    assert again.files["onnx"].read_bytes() == result.files["onnx"].read_bytes()


@pytest.mark.slow
def test_tuned_bundle_is_reproduced_without_a_search(result: Result) -> None:
    folder = next(parent for parent in result.output.parents if (parent / "rules_of_mine.py").is_file())
    progress = Progress()
    assert reproduce(result.output, folder, progress=progress) == []
    assert not any("tun" in name for name in progress.seconds)


def _cached(folder: Path) -> list[dict[str, Any]]:
    """Returns the cached trials: the only entry whose notes are rows."""
    notes = [json.loads(path.read_bytes())["notes"] for path in (folder / "cache").glob("*/entry.json")]
    (trials,) = [note for note in notes if isinstance(note, list) and note and isinstance(note[0], dict)]
    return trials


@pytest.mark.nightly
def test_second_run_starts_from_cached_trials(result: Result, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(folder / "cache"))
    cached = {trial["change"] for trial in _cached(folder)}
    (first,), (second,) = result.tuned, run(folder / "config.toml").tuned
    assert cached >= {first.chosen.change, "as configured"}
    assert {trial.change for trial in second.trials} >= cached
    # It tries the earlier choice again, before anything else; which of two equal files wins is up to noise.
    assert not next(trial.earlier for trial in second.trials if trial.change == first.chosen.change)


@pytest.mark.nightly
def test_fixed_plugin_is_tried_again(result: Result, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = _cached(folder)
    assert trials
    assert all(trial["refused"] is None or trial["refused"].startswith("parity failed") for trial in trials)
    (folder / "rules_of_mine.py").write_text(_RULES.replace("0.5)]\n", "0.0)]\n"), encoding="utf-8")
    monkeypatch.setenv("OPTEXPORT_CACHE", str(folder / "cache"))
    monkeypatch.delitem(sys.modules, "rules_of_mine")
    (outcome,) = run(folder / "config.toml").tuned
    assert outcome.measure == "as configured"
    assert not any(trial.earlier for trial in outcome.trials)
    assert result.passed


class _CacheJob:
    """A job with a rule, a metric with a helper, and two batches, to compute its cache entry."""

    def __init__(self, folder: Path) -> None:
        (folder / "metric_helper.py").write_text("FACTOR = 1\n", encoding="utf-8")
        (folder / "metric_of_mine.py").write_text(
            "import metric_helper\n\ndef mean(own, original):\n    return 1.0\n", encoding="utf-8"
        )
        text = f'{_CONFIG}\n[parity.metrics]\n"python:metric_of_mine:mean" = 0.5\n'
        path = _write(folder, text)
        config = load_config(path)
        load_metrics(config.parity.metrics, folder)
        self.norm = nn.Sequential(nn.LayerNorm(3))
        self.batches = [{"x": torch.zeros(2, 3)}, {"x": torch.ones(2, 3)}]
        self.job: Any = SimpleNamespace(
            config=config,
            rules=load_rules(config, folder, ()),
            precision_of=lambda name: Job.precision_of(self.job, name),
            loaded=SimpleNamespace(weights_sha256="0", model=nn.Identity()),
            example=self.batches[0],
        )

    def name(self) -> str | None:
        cases = [SimpleNamespace(name=str(index), batch=batch) for index, batch in enumerate(self.batches)]
        proof: Any = SimpleNamespace(reference=SimpleNamespace(cases=cases, outputs=[]), tolerances={})
        traced: Any = SimpleNamespace(graph_module=fx.symbolic_trace(self.norm))
        return tuner._cache_entry(self.job, traced, proof, [], "onnx")


@pytest.mark.slow
def test_cache_depends_on_code_of_plugins_and_input_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))
    monkeypatch.delitem(sys.modules, "rules_of_mine", raising=False)
    job = _CacheJob(tmp_path)
    names = [job.name(), job.name()]
    assert names[0] == names[1]
    for file in ("rules_of_mine.py", "metric_of_mine.py", "metric_helper.py"):
        path = tmp_path / file
        path.write_text(path.read_text(encoding="utf-8") + "# other\n", encoding="utf-8")
        names.append(job.name())
    job.batches[1]["x"][0, 0] = 2.0
    names.append(job.name())
    for module in job.norm:
        module.eps = 1e-6  # not part of a graph's text
    names.append(job.name())
    for table in ({"onnx": "int8"}, {"onnx": "int8-blocks"}, {"onnx": "int8", "keep_float32": ["out"]}):
        job.job.config = job.job.config.model_copy(update={"precision": PrecisionConfig.model_validate(table)})
        names.append(job.name())
    onnx = job.job.config.export.onnx.model_copy(update={"providers": ["OpenVINOExecutionProvider"]})
    export = job.job.config.export.model_copy(update={"onnx": onnx})
    job.job.config = job.job.config.model_copy(update={"export": export})
    names.append(job.name())
    assert len(set(names)) == 10
    monkeypatch.delattr(sys.modules["rules_of_mine"], "__file__")
    assert job.name() is None, "code of a notebook's cell"


@pytest.mark.nightly
def test_tune_option_works_without_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    path = _write(tmp_path, _CONFIG.replace('[tune]\nbudget = "3m"\n', ""))
    answer = CliRunner().invoke(cli, ["run", "--tune", str(path)])
    assert answer.exit_code == 0, answer.output
    assert "Tuning" in answer.output
    assert "rejected: parity failed for graph" in answer.output
    assert "onnx: " in answer.output


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ('"soon"', '"soon" is not a duration'),
        ('"٣m"', "is not a duration"),
        ('"0s"', '"0s" is not a duration'),
        ("5", "tune"),
    ],
)
def test_invalid_budget_is_refused(tmp_path: Path, budget: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(_write(tmp_path, _CONFIG.replace('"3m"', budget)))


_PROOF = ParityRecord(
    cases=[], bounds={}, ways=[], fallback=None, unguided=[], left_out=[], gates=[], targets=[]
)  # fmt: skip


def _pair(verdict: Any) -> PairwiseComparison:
    files = [Artifact(name, Path(name), "onnx", 1) for name in ("onnx", "plain onnx")]
    return PairwiseComparison(
        files[0], files[1], Workload({"batch": 1}, 1, Path()), Comparison(0.9, 0.85, 0.95, verdict)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "again", "fails"),
    [
        ("faster", "slower", False),
        ("inconclusive", "slower", False),
        ("slower", "inconclusive", False),
        ("slower", "slower", True),
    ],
)
def test_file_slower_than_plain_twice_fails_with_code_6(first: str, again: str, fails: bool) -> None:
    report = Report(Settings(), (), (_pair(first),))
    expected = pytest.raises(GateError, match=r"onnx has speedup 0.9 \(0.85 to 0.95\)")
    with expected if fails else contextlib.nullcontext() as raised:
        check_never_slower(report, lambda _: _pair(again), _PROOF)
    assert not fails or raised.value.exit_code == 6


@pytest.mark.slow
def test_error_of_a_slower_lowered_file_has_a_hint() -> None:
    pair = _pair("slower")
    pair = replace(pair, artifact=replace(pair.artifact, name="onnx (int8)", precision="int8"))
    with pytest.raises(
        GateError, match=r"onnx \(int8\) has speedup 0.9.*\n.*Remove onnx from \[precision\], or remove \[tune\]"
    ):
        check_never_slower(Report(Settings(), (), (pair,)), lambda _: pair, _PROOF)
