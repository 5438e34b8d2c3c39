"""Gates on decisions: what a config may ask, that each place is held against it, and what is said when it fails."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from optexport import export, pipeline
from optexport.bundle.verification import verify
from optexport.cli.main import cli
from optexport.config.decisions import DecisionConfig
from optexport.errors import ConfigError
from optexport.proof.cases import Case
from optexport.proof.decisions import Decision, Gate, Metric, check_usable, judge, make_gates
from optexport.proof.floor import bounds
from optexport.proof.parity import Proof
from optexport.proof.reference import Reference
from optexport.signature import Batch
from tests import exports
from tests.mistakes import table


def reference(*outputs: Mapping[str, torch.Tensor], batch: Batch | None = None) -> Reference:
    """A case of the user's for each of these outputs, which float64 does not differ from."""
    inputs = ({"index": torch.tensor(i), **(batch or {})} for i in range(len(outputs)))
    cases = tuple(Case(f"case {i}", given, data=True) for i, given in enumerate(inputs))
    return Reference(
        cases,
        tuple(dict(o) for o in outputs),
        tuple({name: v.double() if v.is_floating_point() else v for name, v in o.items()} for o in outputs),
    )


def gates(known: Reference, metrics: Mapping[str, Metric] | None = None, **demanded: Any) -> tuple[Gate, ...]:
    configs = {n: DecisionConfig(**(v if isinstance(v, dict) else {"min": v})) for n, v in demanded.items()}
    configs |= {name: DecisionConfig(min=0.5) for name in metrics or {}}
    return make_gates(configs, metrics or {}, known, bounds(known, 4.0), 4.0)


def decide(known: Reference, *candidate: Mapping[str, torch.Tensor] | str, **demanded: Any) -> Decision:
    (gate,) = gates(known, **demanded)
    return judge(gate, [c if isinstance(c, str) else dict(c) for c in candidate], known)


def rows(wrong: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The original's scores, and a candidate's that chooses otherwise in some rows."""
    original = torch.eye(4).repeat(-(-of // 4), 1)[:of]
    candidate = original.clone()
    candidate[:wrong] = candidate[:wrong].roll(1, -1)
    return original, candidate


# One gate


@pytest.mark.parametrize(("wrong", "passes"), [(0, True), (1, True), (2, False)])
def test_a_gate_passes_at_its_very_value_and_fails_below(wrong: int, passes: bool) -> None:
    original, candidate = rows(wrong, 1000)
    decision = decide(reference({"y": original}), {"y": candidate}, argmax_agreement=0.999)
    assert decision.passed is passes
    assert (decision.value, decision.count, decision.ties) == ((1000 - wrong) / 1000, 1000, 0)


def test_a_failure_tells_output_value_count_interval_and_gate() -> None:
    original, candidate = rows(2, 100)
    decision = decide(reference({"y": original}), {"y": candidate}, argmax_agreement=0.99)
    assert decision.failure == (
        "y, argmax_agreement is 0.98 (98 of 100 positions agree, 95 % interval 0.929988 to 0.994498), and the gate 0.99"
    )


def test_positions_have_the_same_weight_whatever_case_they_are_in() -> None:
    (one, _), (many, wrong) = rows(0, 1), rows(3, 9)
    decision = decide(reference({"y": one}, {"y": many}), {"y": one}, {"y": wrong}, argmax_agreement=0.5)
    assert decision.value == 7 / 10
    assert [(case.total, case.count) for case in decision.cases] == [(1, 1), (6, 9)]


def of_kinds(known: Reference, **kinds: list[int]) -> Reference:
    """The same with some cases extreme, and some of the user's data."""
    cases = [
        Case(c.name, c.batch, **{kind: i in which for kind, which in kinds.items()}) for i, c in enumerate(known.cases)
    ]
    return Reference(tuple(cases), known.outputs, known.exact)


@pytest.mark.parametrize("kinds", [{"extreme": [1]}, {"data": [0]}, {"data": [0, 1], "extreme": [1]}])
def test_the_users_data_count_and_without_them_all_but_extreme_cases(kinds: dict[str, list[int]]) -> None:
    original, candidate = rows(3, 9)
    known = of_kinds(reference({"y": original}, {"y": original}), **kinds)
    decision = decide(known, {"y": original}, {"y": candidate}, argmax_agreement=1.0)
    assert (decision.value, decision.count) == (1.0, 9)


def test_of_made_up_inputs_there_is_no_interval() -> None:
    original, candidate = rows(3, 9)
    known = of_kinds(reference({"y": original}))
    for demanded in ({"argmax_agreement": 1.0}, {"cosine": 1.0}):
        decision = decide(known, {"y": candidate}, **demanded)
        assert (decision.low, decision.high) == (None, None)
        assert " of made-up inputs" in str(decision.failure)
        assert "interval" not in str(decision.failure)


def test_where_a_file_takes_none_of_the_data_the_other_cases_count_and_there_is_no_interval() -> None:
    original, candidate = rows(3, 9)
    known = of_kinds(reference({"y": original}, {"y": original}), data=[1])
    (gate,) = gates(known, argmax_agreement=1.0)
    traced = Reference(known.cases[:1], known.outputs[:1], known.exact[:1])
    decision = judge(gate, [{"y": candidate}], traced)
    assert (decision.passed, decision.count, decision.low) == (False, 9, None)


def test_the_gate_on_cosines_is_on_the_smallest_which_a_mean_would_hide() -> None:
    original = torch.ones(100, 2)
    candidate = original.clone()
    candidate[7] = torch.tensor([1.0, 0.0])
    decision = decide(reference({"y": original}), {"y": candidate}, cosine=0.99)
    assert not decision.passed
    assert decision.value == pytest.approx(0.5**0.5)
    assert decision.mean == pytest.approx(1 - (1 - 0.5**0.5) / 100)
    assert "the smallest of 100 rows; their mean 0.997" in str(decision.failure)


@pytest.mark.parametrize("measure", ["argmax_agreement", "cosine"])
@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        ("it raised ValueError: no", "it raised ValueError: no"),
        ({}, "the output is missing"),
        ({"y": torch.eye(3)}, "its shape is [3, 3], and the original's [4, 4]"),
        ({"y": torch.full((4, 4), float("nan"))}, "16 elements are NaN or infinite where the original's are not"),
    ],
    ids=["raises", "missing", "shape", "nan"],
)
def test_what_cannot_be_compared_agrees_nowhere(measure: str, candidate: Any, why: str) -> None:
    known = reference({"y": torch.eye(4)}, {"y": torch.eye(4)})
    decision = decide(known, {"y": torch.eye(4)}, candidate, **{measure: 0.0})
    assert str(decision.failure).endswith(f", at case 1: {why}")
    assert decision.count == 8
    assert decision.mean == 0.5


def test_rows_that_the_largest_k_fill_are_not_counted() -> None:
    known = reference({"y": torch.rand(2, 3)}, {"y": torch.rand(2, 9)})
    decision = decide(known, *known.outputs, top_k_agreement={"min": 1.0, "k": 3})
    assert (decision.count, decision.value) == (2, 1.0)


def test_padding_of_the_inputs_is_not_counted() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    known = reference({"y": torch.rand(2, 3, 5)}, batch={"attention_mask": mask})
    flipped = {"y": torch.where(mask[..., None] == 1, known.outputs[0]["y"], -known.outputs[0]["y"])}
    for measure, count in (("argmax_agreement", 3), ("cosine", 3), ("greedy_tokens", 2)):
        decision = decide(known, flipped, **{measure: 1.0})
        assert (decision.count, decision.value) == (count, 1.0)


@pytest.mark.parametrize("fixed", [{}, {"atol": 10.0}])
def test_what_is_forgiven_is_the_measured_limit_whatever_tolerance_is_allowed(fixed: dict[str, float]) -> None:
    exact = torch.randn(50, 4, dtype=torch.float64)
    noisy = (exact + 1e-3).float()
    known = Reference((Case("only", {}),), ({"y": noisy},), ({"y": exact},))
    limit = bounds(known, 4.0)["y"].limit
    demanded = {"argmax_agreement": DecisionConfig(min=1.0)}
    (gate,) = make_gates(demanded, {}, known, bounds(known, 4.0, **fixed), 4.0)
    assert gate.slack == pytest.approx(limit)


# Which outputs

THREE = reference({"logits": torch.rand(2, 3, 9), "pooled": torch.rand(2, 9), "ids": torch.ones(2, 3).long()})


def test_without_an_output_a_gate_is_on_each_that_it_is_defined_on() -> None:
    named = {g.measure: [] for g in gates(THREE, argmax_agreement=1.0, cosine=1.0, iou=1.0, greedy_tokens=1.0)}
    for gate in gates(THREE, argmax_agreement=1.0, cosine=1.0, iou=1.0, greedy_tokens=1.0):
        named[gate.measure].append(gate.output)
    assert named == {
        "argmax_agreement": ["logits", "pooled"],
        "cosine": ["logits", "pooled"],
        "iou": ["logits"],
        "greedy_tokens": ["logits"],
    }


@pytest.mark.parametrize(
    ("demanded", "place", "words"),
    [
        (
            {"cosine": {"min": 1.0, "output": "logit"}},
            "cosine.output",
            'Did you mean "logits"? The outputs are logits,',
        ),
        (
            {"cosine": {"min": 1.0, "output": "ids"}},
            "cosine",
            "it is defined on floating point outputs whose last axis",
        ),
        ({"greedy_tokens": {"min": 1.0, "output": "pooled"}}, "greedy_tokens", "[batch, sequence, vocabulary]"),
        ({"iou": {"min": 1.0, "output": "pooled"}}, "iou", "[batch, height, width]"),
        ({"top_k_agreement": {"min": 1.0, "k": 9}}, "top_k_agreement", "last axis is longer than 9"),
    ],
)
def test_an_output_that_is_not_there_or_does_not_fit_is_refused(
    demanded: dict[str, Any], place: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        gates(THREE, **demanded)
    assert caught.value.place == f"parity.decisions.{place}"


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        (lambda c, o: {}["f1"], "at case 0: it raised KeyError: 'f1'"),
        (lambda c, o: float("nan"), "at case 0: it gave nan, where a finite number is wanted"),
        (lambda c, o: None, "at case 0: it raised TypeError"),
        (lambda c, o: c["logits"], "at case 0: it raised ValueError"),
        (lambda c, o: 0.25, "is 0.25 (the mean of 1 batches), and the gate 0.5"),
        (lambda c, o: sys.exit(3), "at case 0: it raised SystemExit"),
    ],
    ids=["raises", "nan", "none", "a tensor of several", "below the gate", "leaves"],
)
def test_a_metric_that_the_original_itself_fails_is_a_mistake_of_the_config(metric: Metric, why: str) -> None:
    name = "python:mine:f1"
    proof = Proof(THREE, bounds(THREE, 4.0), gates(THREE, {name: metric}))
    with pytest.raises(ConfigError) as caught:
        check_usable(proof.places[0].decisions)
    assert caught.value.place == f"parity.decisions.{name}"
    assert why in str(caught.value)


def test_a_metric_cannot_change_what_is_compared_next() -> None:
    def spoils(candidate: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> float:
        candidate["pooled"].zero_()
        del original["ids"]
        return 1.0

    proof = Proof(THREE, bounds(THREE, 4.0), gates(THREE, {"python:mine:f1": spoils}, cosine=1.0))
    assert proof.passed
    assert proof.check("here", lambda batch: THREE.outputs[0]).passed


def test_a_gate_with_nothing_to_count_is_a_mistake_of_the_config() -> None:
    known = reference({"y": -torch.rand(2, 3, 4)})
    proof = Proof(known, bounds(known, 4.0), gates(known, iou=0.0))
    with pytest.raises(ConfigError, match="nothing to count"):
        check_usable(proof.places[0].decisions)


def test_without_gates_nothing_is_decided() -> None:
    assert Proof(THREE, bounds(THREE, 4.0)).places[0].decisions == ()
    assert make_gates(None, {}, THREE, bounds(THREE, 4.0), 4.0) == ()


# The config

D = "parity.decisions"
MISTAKES = {
    "unknown measure": (table(D, "argmax_agrement = 1.0"), D, 'no measure "argmax_agrement". Did you mean "argmax_ag'),
    "unknown far from any": (table(D, "zzz = 1.0"), D, "Known are: argmax_agreement, top_k_agreement, cosine, iou"),
    "unknown key": (table(D, "cosine = { min = 1.0, outptu = 'y' }"), f"{D}.cosine.outptu", 'Did you mean "output"?'),
    "no least value": (table(D, "cosine = { output = 'y' }"), f"{D}.cosine.min", "it is required"),
    "text": (table(D, "cosine = 'high'"), f"{D}.cosine", "it must be a table"),
    "flag": (table(D, "cosine = true"), f"{D}.cosine.min", "not True"),
    "nan": (table(D, "cosine = nan"), f"{D}.cosine.min", "finite"),
    "percent": (table(D, "iou = 99.0"), D, "iou: it lies between 0 and 1, so min cannot be 99"),
    "below all": (table(D, "cosine = -2"), D, "cosine: it lies between -1 and 1, so min cannot be -2"),
    "k of none": (table(D, "top_k_agreement = { min = 1.0, k = 0 }"), f"{D}.top_k_agreement.k", "not 0"),
    "k of cosine": (table(D, "cosine = { min = 1.0, k = 5 }"), D, "cosine has no option k. Known are: min, output."),
    "output of a metric": (table(D, '"python:a:b" = { min = 1, output = "y" }'), D, "has no option output"),
    "metric of no form": (table(D, '"python:f1" = 1.0'), D, 'not of the form "python:module:function"'),
    "metric of nowhere": (
        table(D, '"python:no_such:f1" = 1.0'),
        f"{D}.python:no_such:f1",
        "there is no module no_such",
    ),
    "nothing": (table(D), D, "at least 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_key_and_the_nearest_known_name_before_torch_is_needed(
    name: str, tmp_path: Path
) -> None:
    text, place, words = MISTAKES[name]
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "mine.toml")])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: mine.toml: {place}: ")
    assert words in result.stderr


# A whole run. The rule puts another activation in, which fixed tolerances allow, so that decisions alone tell.

MODULE = """
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return {"logits": self.down(self.act(3 * self.up(x)))}


def load():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier().eval()
"""
ROWS = 400
METRICS = """
def agreement(candidate, original):
    assert set(candidate) == {"logits"}
    return (candidate["logits"].argmax(-1) == original["logits"].argmax(-1)).double().mean()


def raises(candidate, original):
    if not (candidate["logits"] == original["logits"]).all():
        raise LookupError("no label")
    return 1.0


def low(candidate, original):
    return 0.25


number = 3
"""
CONFIG = """
[model]
source = "python:decisions_model:load"
[inputs]
data = "x.npz"
dynamic.batch = [1, 512]
[export]
formats = ["torchscript", "onnx"]
output = "bundle"
[tracking]
enabled = false
[[transformations]]
use = "replace-activation"
old = "silu"
new = "hardswish"
[parity]
atol = 1.0
[parity.decisions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("decisions_model", MODULE), ("my_metrics", METRICS)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)  # that of another test
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((ROWS, 8), np.float32))
    return tmp_path


def call(folder: Path, *gates: str, text: str = CONFIG) -> Result:
    (folder / "mine.toml").write_text("\n".join([text, *gates]), encoding="utf-8")
    return CliRunner().invoke(cli, ["run", str(folder / "mine.toml")])


def test_where_a_tolerance_allows_the_distances_a_gate_decides(folder: Path) -> None:
    passed = call(folder, "argmax_agreement = 0.5", "cosine = { min = 0.5, output = 'logits' }")
    assert passed.exit_code == 0, passed.stderr
    assert re.search(r"onnx, optimised +logits, argmax_agreement +0\.\d+ +0\.5 ", passed.stdout)
    shutil.rmtree(folder / "bundle")
    failed = call(folder, "argmax_agreement = 0.999")
    assert failed.exit_code == 6
    told = failed.stderr.partition("Error: ")[2]
    assert told.startswith(
        "the decisions differ from the original's\n  transformed graph: logits, argmax_agreement is "
    )
    assert re.search(r"is 0\.\d+ \(\d+ of 400 positions agree, 95 % interval .* to .*\), and the gate 0\.999\n", told)
    assert "replace-activation is to blame, which changed" in told
    assert "Traceback" not in failed.stderr
    assert not (folder / "bundle").exists()


def test_what_preserves_the_computation_passes_the_strictest_gates_everywhere(folder: Path) -> None:
    text = CONFIG.replace(
        'use = "replace-activation"\nold = "silu"\nnew = "hardswish"', 'use = "merge-linears"'
    ).replace("atol = 1.0", "")
    gates = ("argmax_agreement = 1.0", "top_k_agreement = { min = 1.0, k = 2 }", '"python:my_metrics:agreement" = 1.0')
    result = call(folder, *gates, text=text)
    assert result.exit_code == 0, result.stderr
    manifest = json.loads((folder / "bundle" / "manifest.json").read_bytes())
    places = ["original", "transformed graph", "torchscript", "onnx", "onnx, optimised"]
    assert [place["place"] for place in manifest["parity"]["places"]] == places
    for place in manifest["parity"]["places"]:
        assert [(d["measure"], d["output"], d["value"]) for d in place["decisions"]] == [
            ("argmax_agreement", "logits", 1.0),
            ("top_k_agreement", "logits", 1.0),
            ("python:my_metrics:agreement", None, 1.0),
        ]
        assert place["decisions"][0]["count"] == sum(case["count"] for case in place["decisions"][0]["cases"])
        assert [d["count"] for d in place["decisions"]] == [ROWS, ROWS, 13]
    assert manifest["config"]["parity"]["decisions"]["top_k_agreement"] == {"min": 1.0, "k": 2}


def test_where_distances_fail_too_the_exit_code_is_theirs(folder: Path) -> None:
    result = call(folder, "argmax_agreement = 1.0", text=CONFIG.replace("atol = 1.0", "atol = 1e-6"))
    assert result.exit_code == 4
    assert "from the reference" in result.stderr
    assert "and the gate 1\n" in result.stderr


def test_a_metric_of_the_users_own_is_a_gate(folder: Path) -> None:
    assert call(folder, '"python:my_metrics:agreement" = 0.5').exit_code == 0
    failed = call(folder, '"python:my_metrics:agreement" = 0.999')
    assert failed.exit_code == 6
    assert re.search(
        r"transformed graph: python:my_metrics:agreement is 0\.\d+ \(the mean of 13 batches", failed.stderr
    )


@pytest.mark.parametrize(
    ("gate", "code", "words"),
    [
        ('"python:my_metrics:raises" = 0.5', 6, "my_metrics:raises, at traced: it raised LookupError: no label"),
        ('"python:my_metrics:low" = 0.5', 2, "my_metrics:low: the original itself does not pass"),
        ('"python:my_metrics:agrement" = 0.5', 2, 'my_metrics has no agrement\n  Did you mean "agreement"?'),
        ('"python:my_metrics:number" = 0.5', 2, "number: it is a int, not a function"),
        ("cosine = { min = 0.5, output = 'logit' }", 2, 'there is no output "logit"\n  Did you mean "logits"?'),
    ],
    ids=["raises", "low", "unknown", "no function", "unknown output"],
)
def test_a_gate_that_cannot_be_measured_is_one_clear_message(folder: Path, gate: str, code: int, words: str) -> None:
    result = call(folder, gate)
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_gates_are_tracked_as_metrics(folder: Path) -> None:
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    text = CONFIG.replace("enabled = false", f'uri = "{uri}"').replace('["torchscript", "onnx"]', '["torchscript"]')
    (folder / "mine.toml").write_text(
        f"{text}\nargmax_agreement = 0.5\n'python:my_metrics:agreement' = 0.5\n", encoding="utf-8"
    )
    result = pipeline.run(folder / "mine.toml")
    assert result.tracking_failure is None
    assert result.run_id is not None
    run = mlflow.MlflowClient(uri).get_run(result.run_id)
    prefix = "decisions.torchscript.logits.argmax_agreement"
    metrics = run.data.metrics
    assert metrics[f"{prefix}.low"] < metrics[f"{prefix}.value"] < metrics[f"{prefix}.high"]
    assert metrics[f"{prefix}.count"] == ROWS
    assert 0.5 <= metrics["decisions.torchscript.python_my_metrics_agreement.value"] <= 1.0
    assert run.data.params["parity.decisions.argmax_agreement.min"] == "0.5"


# The bundle


@pytest.fixture
def bundle(folder: Path) -> Path:
    assert call(folder, "argmax_agreement = 0.5", '"python:my_metrics:agreement" = 0.5').exit_code == 0
    return folder / "bundle"


def change_gate(bundle: Path, **values: Any) -> None:
    exports.edit_json(bundle / "manifest.json", lambda d: d["parity"]["gates"][0].update(values))


def test_a_bundle_is_held_against_its_gates_again_but_not_those_of_code_that_it_does_not_hold(bundle: Path) -> None:
    places = verify(bundle).places[1:]
    assert all(place.passed for place in places)
    assert [[d.gate.name for d in place.decisions] for place in places] == [["logits, argmax_agreement"]] * 3


def test_stored_cases_need_do_no_better_than_they_did(bundle: Path) -> None:
    recorded = json.loads((bundle / "manifest.json").read_bytes())["parity"]["places"][2]["decisions"][0]
    change_gate(bundle, min=recorded["value"] + 0.01)
    assert all(place.passed for place in verify(bundle).places[1:]), "as where the other cases had made up for them"


def test_a_bundle_that_decides_otherwise_ends_with_the_code_of_a_gate(bundle: Path) -> None:
    def pretend(document: dict[str, Any]) -> None:
        document["parity"]["gates"][0]["min"] = 1.0
        for place in document["parity"]["places"]:
            for case in place["decisions"][0]["cases"]:
                case["total"] = case["count"]

    exports.edit_json(bundle / "manifest.json", pretend)
    result = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert result.exit_code == 6
    assert "onnx: logits, argmax_agreement is 0." in result.stderr
    assert "and the gate 1\n" in result.stderr


@pytest.mark.parametrize("wrong", [{"measure": "magic"}, {"output": "other"}, {"output": None}])
def test_a_gate_on_nothing_known_is_a_damaged_bundle(bundle: Path, wrong: dict[str, Any]) -> None:
    change_gate(bundle, **wrong)
    result = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert result.exit_code == 4
    assert "it has a gate on what is no measure, or no output" in result.stderr


# From Python


def test_gates_can_be_given_from_python(tmp_path: Path) -> None:
    given = {"dynamic": exports.DYNAMIC, "formats": ["pt2"], "transformations": []}
    demanded = {"cosine": {"min": 0.9999, "output": "hidden"}, "argmax_agreement": 1}
    result = export(exports.block(), exports.batch(), tmp_path / "block", decisions=demanded, **given)
    assert [d.gate.measure for d in result.parity[-1].decisions] == ["cosine", "argmax_agreement"]
    assert all(d.value == pytest.approx(1.0) for d in result.parity[-1].decisions)
    with pytest.raises(ConfigError, match='no measure "cosin". Did you mean "cosine"'):
        export(exports.block(), exports.batch(), tmp_path / "other", decisions={"cosin": 1.0}, **given)
