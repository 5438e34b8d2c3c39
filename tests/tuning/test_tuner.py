"""Tuning as a run does it: files are made, proven and measured, and what was chosen is what is shipped."""

from __future__ import annotations

import contextlib
import json
import sys
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
from optexport.bench.comparison import Comparison
from optexport.bench.gates import check_never_slower
from optexport.bench.measure import PairwiseComparison, Report
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.bundle import digests
from optexport.bundle.manifest import ParityRecord
from optexport.cli.main import cli
from optexport.config.load import load_config
from optexport.errors import ConfigError, GateError
from optexport.job import rules_of
from optexport.parity.gates import load_metrics
from optexport.pipeline.reproduce import reproduce
from optexport.pipeline.run import run
from optexport.result import Result
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
[bench]
rounds = 12
[tune]
budget = "4s"
[tracking]
enabled = false
"""


# What is tried where the configured rules do not pass together.
_ONE_BY_ONE = ("without python:rules_of_mine:Slows", "without python:rules_of_mine:Breaks")


def _write(folder: Path, text: str = _CONFIG) -> Path:
    (folder / "rules_of_mine.py").write_text(_RULES, encoding="utf-8")
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuner")


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTEXPORT_CACHE", str(folder / "cache"))
        return run(_write(folder))


def test_a_rule_that_only_slows_is_dropped_and_one_that_breaks_is_refused(result: Result) -> None:
    (outcome,) = result.tuned
    assert outcome.chosen.rules == ()
    assert result.manifest.transformations == []
    refused = {trial.change: trial.refused or "" for trial in outcome.trials}
    assert refused["as configured"].startswith("not the same at transformed graph: hidden at traced")
    slowed = next(trial for trial in outcome.trials if trial.change == "without python:rules_of_mine:Breaks")
    assert slowed.refused is None


def test_what_was_tried_is_in_the_measurements_and_what_was_chosen_in_the_manifest(result: Result) -> None:
    (tuned,) = json.loads((result.output / "measurements.json").read_text())["tune"]
    assert tuned["chosen"]["rules"] == []
    assert {trial["change"] for trial in tuned["trials"]} >= {"plain export", "as configured"}
    manifest = digests.read_manifest(result.output)
    assert manifest.config["transformations"] == []
    assert "tune" not in manifest.config
    (artifact,) = manifest.artifacts
    assert artifact.passes == list(tuned["chosen"]["passes"])


def test_a_config_of_what_was_chosen_gives_the_same_file_without_a_search(result: Result, tmp_path: Path) -> None:
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


def test_a_tuned_bundle_is_made_again_without_a_search(result: Result) -> None:
    folder = next(parent for parent in result.output.parents if (parent / "rules_of_mine.py").is_file())
    progress = Progress()
    assert reproduce(result.output, folder, progress) == []
    assert not any("tun" in name for name in progress.seconds)


def _kept(folder: Path) -> list[dict[str, Any]]:
    """The trials that are kept: the only entry whose notes are rows."""
    notes = [json.loads(path.read_bytes())["notes"] for path in (folder / "cache").glob("*/entry.json")]
    (trials,) = [note for note in notes if isinstance(note, list) and note and isinstance(note[0], dict)]
    return trials


def test_a_second_run_starts_from_what_the_first_one_found(
    result: Result, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(folder / "cache"))
    kept = {trial["change"] for trial in _kept(folder)}
    (first,), (second,) = result.tuned, run(folder / "config.toml").tuned
    assert kept >= {first.chosen.change, "as configured"}
    assert {trial.change for trial in second.trials} >= kept
    assert second.chosen.change == first.chosen.change


@pytest.mark.nightly
def test_a_plugin_that_was_mended_is_tried_again(result: Result, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = _kept(folder)
    assert trials
    assert all(trial["refused"] is None or trial["refused"].startswith("not the same") for trial in trials)
    (folder / "rules_of_mine.py").write_text(_RULES.replace("0.5)]\n", "0.0)]\n"), encoding="utf-8")
    monkeypatch.setenv("OPTEXPORT_CACHE", str(folder / "cache"))
    monkeypatch.delitem(sys.modules, "rules_of_mine")
    (outcome,) = run(folder / "config.toml").tuned
    assert outcome.measure == "as configured"
    assert not any(trial.earlier for trial in outcome.trials)
    assert result.passed


class _Kept:
    """What a search of one format is kept under, of a rule and a metric with a helper, and of two batches."""

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
            rules=rules_of(config, folder, ()),
            loaded=SimpleNamespace(weights_sha256="0", model=nn.Identity()),
            example=self.batches[0],
        )

    def name(self) -> str:
        cases = [SimpleNamespace(name=str(index), batch=batch) for index, batch in enumerate(self.batches)]
        proof: Any = SimpleNamespace(reference=SimpleNamespace(cases=cases, outputs=[]), bounds={})
        traced: Any = SimpleNamespace(graph_module=fx.symbolic_trace(self.norm))
        return tuner._entry(self.job, traced, proof, [], "onnx")


def test_other_code_of_a_rule_or_a_metric_and_other_values_of_inputs_are_searched_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))
    monkeypatch.delitem(sys.modules, "rules_of_mine", raising=False)
    kept = _Kept(tmp_path)
    names = [kept.name(), kept.name()]
    assert names[0] == names[1]
    for file in ("rules_of_mine.py", "metric_of_mine.py", "metric_helper.py"):
        path = tmp_path / file
        path.write_text(path.read_text(encoding="utf-8") + "# other\n", encoding="utf-8")
        names.append(kept.name())
    kept.batches[1]["x"][0, 0] = 2.0
    names.append(kept.name())
    for module in kept.norm:
        module.eps = 1e-6  # which the text of a graph does not hold
    names.append(kept.name())
    assert len(set(names)) == 6


@pytest.mark.nightly
def test_the_switch_tunes_without_a_table_and_tells_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    path = _write(tmp_path, _CONFIG.replace('[tune]\nbudget = "4s"\n', ""))
    answer = CliRunner().invoke(cli, ["run", "--tune", str(path)])
    assert answer.exit_code == 0, answer.output
    assert "Tuned" in answer.output
    assert "refused: not the same at transformed graph" in answer.output
    assert "onnx: " in answer.output


@pytest.mark.parametrize(
    ("budget", "told"),
    [('"soon"', '"soon" is no time'), ('"٣m"', "is no time"), ('"0s"', '"0s" is no time'), ("5", "tune")],
)
def test_a_budget_that_is_no_time_is_refused(tmp_path: Path, budget: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(_write(tmp_path, _CONFIG.replace('"4s"', budget)))


_PROOF = ParityRecord(
    cases=[], bounds={}, ways=[], fallback=None, unguided=[], left_out=[], gates=[], places=[]
)  # fmt: skip


def _duel(verdict: Any) -> PairwiseComparison:
    files = [Artifact(name, Path(name), "onnx", 1) for name in ("onnx", "plain onnx")]
    return PairwiseComparison(
        files[0], files[1], Workload({"batch": 1}, 1, Path()), Comparison(0.9, 0.85, 0.95, verdict)
    )


@pytest.mark.parametrize(
    ("first", "again", "fails"),
    [
        ("faster", "slower", False),
        ("cannot tell", "slower", False),
        ("slower", "cannot tell", False),
        ("slower", "slower", True),
    ],
)
def test_what_is_slower_than_the_plain_export_twice_fails_with_exit_code_6(first: str, again: str, fails: bool) -> None:
    report = Report(Settings(), (), (_duel(first),))
    expected = pytest.raises(GateError, match=r"onnx is 0.9 \(0.85 to 0.95\) times as fast")
    with expected if fails else contextlib.nullcontext() as raised:
        check_never_slower(report, lambda _: _duel(again), _PROOF)
    assert not fails or raised.value.exit_code == 6


def test_a_file_that_was_lowered_after_tuning_and_is_slower_is_not_laid_to_tuning_alone() -> None:
    duel = _duel("slower")
    duel = replace(duel, artifact=replace(duel.artifact, name="onnx (int8)", precision="int8"))
    with pytest.raises(GateError, match=r"onnx \(int8\) is 0.9.*\n.*leave onnx out of \[precision\], or \[tune\] out"):
        check_never_slower(Report(Settings(), (), (duel,)), lambda _: duel, _PROOF)
