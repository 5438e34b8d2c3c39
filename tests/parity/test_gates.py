"""Tests gates on decisions: their values, their outputs and their failure messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from optexport.config.metrics import MetricGateConfig
from optexport.errors import ConfigError
from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker
from optexport.parity.gates import Gate, GateResult, Metric, check_usable, describe_gate_result, judge, make_gates
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference import Reference
from optexport.signature.signature import Batch


def make_reference(*outputs: Mapping[str, torch.Tensor], batch: Batch | None = None) -> Reference:
    """Returns a reference with one data case per output and no noise."""
    inputs = ({"index": torch.tensor(i), **(batch or {})} for i in range(len(outputs)))
    cases = tuple(Case(f"case {i}", batch_of_case, data=True) for i, batch_of_case in enumerate(inputs))
    return Reference(
        cases,
        tuple(dict(o) for o in outputs),
        tuple({name: v.double() if v.is_floating_point() else v for name, v in o.items()} for o in outputs),
    )


def gates(reference: Reference, metrics: Mapping[str, Metric] | None = None, **minima: Any) -> tuple[Gate, ...]:
    configs = {n: MetricGateConfig(**(v if isinstance(v, dict) else {"min": v})) for n, v in minima.items()}
    configs |= {name: MetricGateConfig(min=0.5) for name in metrics or {}}
    return make_gates(configs, metrics or {}, reference, measure_tolerances(reference, 4.0), 4.0)


def decide(reference: Reference, *candidate: Mapping[str, torch.Tensor] | str, **minima: Any) -> GateResult:
    (gate,) = gates(reference, **minima)
    return judge(gate, [c if isinstance(c, str) else dict(c) for c in candidate], reference)


def rows(wrong: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the original's scores and a candidate's with another argmax in some rows."""
    original = torch.eye(4).repeat(-(-of // 4), 1)[:of]
    candidate = original.clone()
    candidate[:wrong] = candidate[:wrong].roll(1, -1)
    return original, candidate


# One gate


@pytest.mark.parametrize(("wrong", "passes"), [(0, True), (1, True), (2, False)])
def test_a_gate_passes_at_its_exact_value_and_fails_below(wrong: int, passes: bool) -> None:
    original, candidate = rows(wrong, 1000)
    gate_result = decide(make_reference({"y": original}), {"y": candidate}, argmax_agreement=0.999)
    assert gate_result.passed is passes
    assert (gate_result.value, gate_result.count, gate_result.ties) == ((1000 - wrong) / 1000, 1000, 0)


def test_a_value_just_below_its_gate_is_printed_in_full() -> None:
    reference = make_reference({"y": torch.ones(2, 3)})
    (gate,) = gates(reference, cosine=1.0)
    nearly = replace(judge(gate, [{"y": torch.ones(2, 3)}], reference), value=1 - 2.0**-40)
    assert describe_gate_result(nearly).startswith("0.9999999999990905 (the smallest of 2")


def test_a_failure_names_output_value_count_interval_and_gate() -> None:
    original, candidate = rows(2, 100)
    gate_result = decide(make_reference({"y": original}), {"y": candidate}, argmax_agreement=0.99)
    assert gate_result.failure == (
        "y, argmax_agreement is 0.98 (98 of 100 positions agree, 95 % interval 0.929988 to 0.994498); the gate is 0.99"
    )


def test_positions_have_equal_weight_in_every_case() -> None:
    (one, _), (many, wrong) = rows(0, 1), rows(3, 9)
    gate_result = decide(make_reference({"y": one}, {"y": many}), {"y": one}, {"y": wrong}, argmax_agreement=0.5)
    assert gate_result.value == 7 / 10
    assert [(case.total, case.count) for case in gate_result.cases] == [(1, 1), (6, 9)]


def mark_cases(reference: Reference, **kinds: list[int]) -> Reference:
    """Returns the reference with some cases marked as extreme or as data."""
    cases = [
        Case(c.name, c.batch, **{kind: i in which for kind, which in kinds.items()})
        for i, c in enumerate(reference.cases)
    ]
    return Reference(tuple(cases), reference.outputs, reference.exact)


@pytest.mark.parametrize("kinds", [{"extreme": [1]}, {"data": [0]}, {"data": [0, 1], "extreme": [1]}])
def test_gates_count_data_cases_or_else_all_ordinary_cases(kinds: dict[str, list[int]]) -> None:
    original, candidate = rows(3, 9)
    reference = mark_cases(make_reference({"y": original}, {"y": original}), **kinds)
    gate_result = decide(reference, {"y": original}, {"y": candidate}, argmax_agreement=1.0)
    assert (gate_result.value, gate_result.count) == (1.0, 9)


def test_generated_inputs_have_no_interval() -> None:
    original, candidate = rows(3, 9)
    reference = mark_cases(make_reference({"y": original}))
    for minima in ({"argmax_agreement": 1.0}, {"cosine": 1.0}):
        gate_result = decide(reference, {"y": candidate}, **minima)
        assert (gate_result.low, gate_result.high) == (None, None)
        assert " of generated inputs" in str(gate_result.failure)
        assert "interval" not in str(gate_result.failure)


def test_other_cases_count_if_a_file_takes_no_data_case() -> None:
    original, candidate = rows(3, 9)
    reference = mark_cases(make_reference({"y": original}, {"y": original}), data=[1])
    (gate,) = gates(reference, argmax_agreement=1.0)
    traced = Reference(reference.cases[:1], reference.outputs[:1], reference.exact[:1])
    gate_result = judge(gate, [{"y": candidate}], traced)
    assert (gate_result.passed, gate_result.count, gate_result.low) == (False, 9, None)


def test_a_cosine_gate_applies_to_the_smallest_row() -> None:
    original = torch.ones(100, 2)
    candidate = original.clone()
    candidate[7] = torch.tensor([1.0, 0.0])
    gate_result = decide(make_reference({"y": original}), {"y": candidate}, cosine=0.99)
    assert not gate_result.passed
    assert gate_result.value == pytest.approx(0.5**0.5)
    assert gate_result.mean == pytest.approx(1 - (1 - 0.5**0.5) / 100)
    assert "the smallest of 100 rows; their mean 0.997" in str(gate_result.failure)


@pytest.mark.parametrize("measure", ["argmax_agreement", "cosine"])
@pytest.mark.parametrize(
    ("candidate", "problem"),
    [
        ("it raised ValueError: no", "it raised ValueError: no"),
        ({}, "the output is missing"),
        ({"y": torch.eye(3)}, "expected shape [4, 4], found [3, 3]"),
        ({"y": torch.full((4, 4), float("nan"))}, "16 elements are NaN or infinite, but finite in the original"),
    ],
    ids=["raises", "missing", "shape", "nan"],
)
def test_an_incomparable_output_agrees_nowhere(measure: str, candidate: Any, problem: str) -> None:
    reference = make_reference({"y": torch.eye(4)}, {"y": torch.eye(4)})
    gate_result = decide(reference, {"y": torch.eye(4)}, candidate, **{measure: 0.0})
    assert str(gate_result.failure).endswith(f", at case 1: {problem}")
    assert gate_result.count == 8
    assert gate_result.mean == 0.5


def test_rows_of_at_most_k_elements_are_not_counted() -> None:
    reference = make_reference({"y": torch.rand(2, 3)}, {"y": torch.rand(2, 9)})
    gate_result = decide(reference, *reference.outputs, top_k_agreement={"min": 1.0, "k": 3})
    assert (gate_result.count, gate_result.value) == (2, 1.0)


def test_padding_of_the_inputs_is_not_counted() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    reference = make_reference({"y": torch.rand(2, 3, 5)}, batch={"attention_mask": mask})
    flipped = {"y": torch.where(mask[..., None] == 1, reference.outputs[0]["y"], -reference.outputs[0]["y"])}
    for measure, count in (("argmax_agreement", 3), ("cosine", 3), ("greedy_tokens", 2)):
        gate_result = decide(reference, flipped, **{measure: 1.0})
        assert (gate_result.count, gate_result.value) == (count, 1.0)


@pytest.mark.parametrize("fixed", [{}, {"atol": 10.0}])
def test_slack_is_the_measured_limit_even_with_a_tolerance(fixed: dict[str, float]) -> None:
    exact = torch.randn(50, 4, dtype=torch.float64)
    noisy = (exact + 1e-3).float()
    reference = Reference((Case("only", {}),), ({"y": noisy},), ({"y": exact},))
    limit = measure_tolerances(reference, 4.0)["y"].limit
    minima = {"argmax_agreement": MetricGateConfig(min=1.0)}
    (gate,) = make_gates(minima, {}, reference, measure_tolerances(reference, 4.0, **fixed), 4.0)
    assert gate.slack == pytest.approx(limit)


# Choice of outputs

THREE = make_reference({"logits": torch.rand(2, 3, 9), "pooled": torch.rand(2, 9), "ids": torch.ones(2, 3).long()})


def test_a_gate_without_output_applies_to_all_fitting_outputs() -> None:
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
    ("minima", "target", "words"),
    [
        (
            {"cosine": {"min": 1.0, "output": "logit"}},
            "cosine.output",
            'Did you mean "logits"? The outputs are logits,',
        ),
        (
            {"cosine": {"min": 1.0, "output": "ids"}},
            "cosine",
            "the metric needs floating point outputs whose last axis",
        ),
        ({"greedy_tokens": {"min": 1.0, "output": "pooled"}}, "greedy_tokens", "[batch, sequence, vocabulary]"),
        ({"iou": {"min": 1.0, "output": "pooled"}}, "iou", "[batch, height, width]"),
        ({"top_k_agreement": {"min": 1.0, "k": 9}}, "top_k_agreement", "last axis is longer than 9"),
    ],
)
def test_a_missing_or_unfit_output_is_refused(minima: dict[str, Any], target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        gates(THREE, **minima)
    assert caught.value.location == f"parity.metrics.{target}"


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (lambda c, o: {}["f1"], "at case 0: the metric raised KeyError: 'f1'"),
        (lambda c, o: float("nan"), "at case 0: expected a finite number from the metric, found nan"),
        (lambda c, o: None, "at case 0: the metric raised TypeError"),
        (lambda c, o: c["logits"], "at case 0: the metric raised ValueError"),
        (lambda c, o: 0.25, "is 0.25 (the mean of 1 batches); the gate is 0.5"),
        (lambda c, o: sys.exit(3), "at case 0: the metric raised SystemExit"),
    ],
    ids=["raises", "nan", "none", "a tensor of several", "below the gate", "leaves"],
)
def test_a_metric_failed_by_the_original_is_a_config_error(metric: Metric, problem: str) -> None:
    name = "python:mine:f1"
    proof = ParityChecker(THREE, measure_tolerances(THREE, 4.0), gates(THREE, {name: metric}))
    with pytest.raises(ConfigError) as caught:
        check_usable(proof.targets[0].gate_results)
    assert caught.value.location == f"parity.metrics.{name}"
    assert problem in str(caught.value)


def test_a_metric_cannot_change_later_comparisons() -> None:
    def spoils(candidate: dict[str, torch.Tensor], original: dict[str, torch.Tensor]) -> float:
        candidate["pooled"].zero_()
        del original["ids"]
        return 1.0

    proof = ParityChecker(THREE, measure_tolerances(THREE, 4.0), gates(THREE, {"python:mine:f1": spoils}, cosine=1.0))
    assert proof.passed
    assert proof.check("here", lambda batch: THREE.outputs[0]).passed


def test_a_gate_with_nothing_to_count_is_a_config_error() -> None:
    reference = make_reference({"y": -torch.rand(2, 3, 4)})
    proof = ParityChecker(reference, measure_tolerances(reference, 4.0), gates(reference, iou=0.0))
    with pytest.raises(ConfigError, match="no value counts"):
        check_usable(proof.targets[0].gate_results)


def test_without_gates_nothing_is_decided() -> None:
    assert ParityChecker(THREE, measure_tolerances(THREE, 4.0)).targets[0].gate_results == ()
    assert make_gates(None, {}, THREE, measure_tolerances(THREE, 4.0), 4.0) == ()
