"""Tests the parity check: limits, failures and the case that each failure names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from optexport.errors import ExportError, ParityError
from optexport.parity.cases.case import Case
from optexport.parity.checker import GRAPH, ONNX, ONNX_OPTIMIZED, OutputParity, ParityChecker
from optexport.parity.distances import MIN_FLOOR_ULPS
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference import Reference
from optexport.parity.reference_run import run_original
from optexport.signature.signature import Batch
from tests._helpers.models import randomise
from tests.parity.network import EPS, Network, Tensors, call, network


def make_reference(*original: torch.Tensor, exact: tuple[torch.Tensor, ...] | None = None) -> Reference:
    """Returns a reference with one output ``y`` and one case per value."""
    cases = tuple(Case(f"case {i}", {"index": torch.tensor(i)}) for i in range(len(original)))
    exact = tuple(o.double() if o.is_floating_point() else o for o in original) if exact is None else exact
    return Reference(cases, tuple({"y": o} for o in original), tuple({"y": e} for e in exact))


def with_extreme_last(reference: Reference) -> Reference:
    """Returns the reference with its last case marked extreme."""
    return replace(reference, cases=(*reference.cases[:-1], replace(reference.cases[-1], extreme=True)))


def compare(reference: Reference, *candidate: torch.Tensor, multiple: float = 4.0, **fixed: float) -> OutputParity:
    """Compares a candidate that returns one value per case."""

    def run(batch: Batch) -> Tensors:
        return {"y": candidate[int(batch["index"])]}

    (output,) = ParityChecker(reference, measure_tolerances(reference, multiple, **fixed)).check("here", run).outputs
    return output


def test_an_output_empty_in_all_ordinary_cases_is_refused() -> None:
    values, empty = torch.ones(2, 4), torch.zeros(0, 4)
    for reference in (make_reference(empty, empty), with_extreme_last(make_reference(empty, values))):
        with pytest.raises(ParityError, match="the output cannot be checked, because it has no elements"):
            measure_tolerances(reference, 4.0)
        assert measure_tolerances(reference, 4.0, always_empty=["y"])["y"].limit == 0
    assert compare(make_reference(empty, values), empty, values).passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_output_without_finite_values_is_refused(value: float) -> None:
    """The error blamed baked-in sizes, although the results matched the original."""
    with pytest.raises(ParityError, match="the output cannot be checked, because the original model returns only NaN"):
        measure_tolerances(make_reference(torch.full((2, 4), value)), 4.0)


def test_a_file_checked_only_on_empty_outputs_fails() -> None:
    reference = make_reference(torch.zeros(0, 4), torch.ones(2, 4))
    cases = (reference.cases[0], Case("wider", {"index": torch.tensor([1])}))
    checker = ParityChecker(replace(reference, cases=cases), measure_tolerances(reference, 4.0))
    (output,) = checker.check("file", lambda _: {"y": torch.zeros(0, 4)}, traced_shape_only=True).outputs
    assert output.failure == "at case 0: the original returns no elements, so nothing can be checked"


def test_a_model_passes_against_itself_at_its_noise_floor() -> None:
    model, cases = network()
    reference = run_original(call, model, cases)
    tolerances = measure_tolerances(reference, 4.0)
    (output,) = ParityChecker(reference, tolerances).check("here", lambda batch: call(model, batch)).outputs
    assert output.passed
    assert output.floor_ratio == 1.0
    assert output.max_abs == output.floor == tolerances["y"].floor > 0
    assert output.passing_atol == 0.0
    assert output.argmax_agreement == 1.0
    assert ParityChecker(reference, tolerances).passed


@pytest.mark.parametrize("multiple", [1.0, 4.0, 10.0])
def test_the_limit_is_the_multiple_of_the_measured_floor(multiple: float) -> None:
    exact = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    reference = make_reference((exact + 1e-3).float(), exact=(exact,))
    floor = measure_tolerances(reference, multiple)["y"].floor
    assert floor == pytest.approx(1e-3, rel=1e-3)
    for share, passes in ((0.99, True), (1.01, False)):
        candidate = exact.float()
        candidate[1] += share * multiple * floor
        assert compare(reference, candidate, multiple=multiple).passed is passes
        assert compare(reference, candidate, multiple=multiple).floor_ratio == pytest.approx(share * multiple, rel=1e-3)


def test_without_rounding_only_a_few_ulps_pass() -> None:
    weight = torch.tensor([0.5, 3.0, -1.0])
    reference = make_reference(weight)
    assert measure_tolerances(reference, 4.0)["y"].floor == 0.0
    assert compare(reference, weight).floor_ratio == 0.0
    allowed = 4 * MIN_FLOOR_ULPS * EPS * 3.0
    assert compare(reference, weight + torch.tensor([0.0, 0.9 * allowed, 0.0])).passed
    beyond = compare(reference, weight + torch.tensor([0.0, 1.2 * allowed, 0.0]))
    assert not beyond.passed
    assert math.isinf(beyond.floor_ratio)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fixed", [{}, {"atol": 1e9, "rtol": 1.0}])
def test_nan_or_infinity_fails_if_the_original_is_finite(value: float, fixed: dict[str, float]) -> None:
    reference = make_reference(torch.ones(2, 3), torch.ones(4, 3))
    wrong = torch.ones(4, 3)
    wrong[2, 1] = value
    output = compare(reference, torch.ones(2, 3), wrong, **fixed)
    assert output.failure == "at case 1: 1 elements are NaN or infinite, but finite in the original"
    assert output.worst_case == "case 1"


def test_nan_and_infinity_pass_if_the_original_has_the_same() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    output = compare(make_reference(values), values.clone())
    assert output.passed
    assert output.max_abs == 0.0


@pytest.mark.parametrize("value", [1.0, -math.inf, math.nan])
def test_an_infinity_must_stay_the_same_infinity(value: float) -> None:
    reference = make_reference(torch.tensor([math.inf, 1.0]))
    assert "infinite" in str(compare(reference, torch.tensor([value, 1.0])).failure)


def test_values_fail_if_their_difference_overflows() -> None:
    largest = torch.finfo(torch.float64).max
    original = torch.tensor([-largest, 1.0], dtype=torch.float64)
    output = compare(make_reference(original), torch.tensor([largest, 1.0], dtype=torch.float64))
    assert not output.passed
    assert output.max_abs == math.inf
    assert output.cosine == pytest.approx(-1.0)
    assert compare(make_reference(original), original.clone()).passed


def test_overflow_in_float64_only_compares_with_the_original() -> None:
    reference = make_reference(torch.tensor([2.0, 1.0]), exact=(torch.tensor([math.inf, 1.0], dtype=torch.float64),))
    assert compare(reference, torch.tensor([2.0, 1.0])).passed
    assert not compare(reference, torch.tensor([3.0, 1.0])).passed


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (torch.ones(3, 2), "expected shape [2, 3], found [3, 2]"),
        (torch.ones(2, 3, 1), "expected shape [2, 3], found [2, 3, 1]"),
        (torch.ones(2, 3).double(), "expected dtype torch.float32, found torch.float64"),
        (torch.ones(2, 3).long(), "expected dtype torch.float32, found torch.int64"),
    ],
)
def test_another_shape_or_dtype_fails_and_names_the_case(wrong: torch.Tensor, problem: str) -> None:
    output = compare(make_reference(torch.ones(1, 3), torch.ones(2, 3)), torch.ones(1, 3), wrong, atol=1e9)
    assert output.failure == f"at case 1: {problem}"


def test_a_missing_output_fails_and_the_others_are_compared() -> None:
    case = Case("only", {})
    both = {"first": torch.ones(2), "second": torch.ones(2)}
    reference = Reference((case,), (both,), ({name: value.double() for name, value in both.items()},))
    first, second = (
        ParityChecker(reference, measure_tolerances(reference, 4))
        .check("here", lambda _: {"second": torch.ones(2)})
        .outputs
    )
    assert first.failure == "at only: the output is missing"
    assert second.passed


def test_a_candidate_that_raises_fails_and_names_the_case() -> None:
    reference = make_reference(torch.ones(2), torch.ones(3))

    def run(batch: Batch) -> Tensors:
        if int(batch["index"]) == 1:
            raise ValueError("\n  the size 3 was baked in\nand more")
        return {"y": torch.ones(2)}

    target = ParityChecker(reference, measure_tolerances(reference, 4.0)).check("here", run)
    assert not target.passed
    assert target.outputs[0].failure == "at case 1: the target raised ValueError: the size 3 was baked in"


@pytest.mark.parametrize("fixed", [{}, {"atol": 10.0, "rtol": 10.0}])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_booleans_must_be_equal(dtype: torch.dtype, fixed: dict[str, float]) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    wrong = values.clone()
    wrong[1, 1] = 1
    assert compare(make_reference(values), values.clone(), **fixed).passed
    assert not compare(make_reference(values), wrong, **fixed).passed


def test_large_integers_must_be_equal_too() -> None:
    values = torch.tensor([2**53, -(2**62)])
    assert compare(make_reference(values), values.clone()).passed
    assert not compare(make_reference(values), values + 1).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision_has_its_own_noise_floor(dtype: torch.dtype) -> None:
    model = randomise(Network()).to(dtype)
    reference = run_original(call, model, [Case("only", {"x": torch.randn(5, 6, dtype=dtype)})])
    tolerances = measure_tolerances(reference, 4.0)
    result = reference.outputs[0]["y"]
    assert ParityChecker(reference, tolerances).check("here", lambda _: {"y": result.clone()}).passed
    size = float(result.double().abs().max())
    limit = tolerances["y"].limit
    assert torch.finfo(dtype).eps * size < limit < 200 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize(
    ("fixed", "offset", "passes"),
    [
        ({"atol": 0.1}, (0.09, 0.09), True),
        ({"atol": 0.1}, (0.11, 0.0), False),
        ({"rtol": 0.01}, (0.009, 0.9), True),
        ({"rtol": 0.01}, (0.011, 0.0), False),
        ({"atol": 0.1, "rtol": 0.01}, (0.10, 1.05), True),
        ({"atol": 0.1, "rtol": 0.01}, (0.12, 0.0), False),
        ({"atol": 0.1, "rtol": 0.01}, (0.0, 1.2), False),
        ({"atol": 0.0}, (0.0, 0.0), True),
        ({"atol": 0.0}, (1e-6, 0.0), False),
    ],
)
def test_a_fixed_tolerance_compares_elements_with_the_original(
    fixed: dict[str, float], offset: tuple[float, float], passes: bool
) -> None:
    # The float64 values are far away, which must not matter here.
    reference = make_reference(torch.tensor([1.0, 100.0]), exact=(torch.tensor([5.0, 500.0], dtype=torch.float64),))
    assert compare(reference, torch.tensor([1.0, 100.0]) + torch.tensor(offset), **fixed).passed is passes


def test_the_reported_tolerance_is_the_smallest_that_passes() -> None:
    reference = make_reference(torch.randn(4, 5), torch.randn(2, 5))
    candidate = [o["y"] + 0.01 * torch.randn_like(o["y"]) for o in reference.outputs]
    tolerance = compare(reference, *candidate).passing_atol
    assert compare(reference, *candidate, atol=tolerance).passed
    assert not compare(reference, *candidate, atol=0.999 * tolerance).passed


@pytest.mark.parametrize(
    "filler",
    [(-1e9, -1e9), (torch.finfo(torch.float32).min, torch.finfo(torch.float64).min), (3e38, 3e38)],
    ids=["constant", "smallest of its dtype", "large"],
)
def test_a_masked_element_does_not_hide_a_fault_in_the_others(filler: tuple[float, float]) -> None:
    exact = torch.tensor([filler[1], 1.0, 2.0], dtype=torch.float64)
    original = torch.tensor([filler[0], 1.0, 2.0]) + torch.tensor([0.0, EPS, 0.0])
    reference = make_reference(original, exact=(exact,))
    assert compare(reference, original.clone()).passed
    assert not compare(reference, torch.tensor([filler[0], 3.0, -40.0])).passed


def test_a_majority_of_masked_elements_hides_no_fault() -> None:
    original = torch.full((4, 10), -1e9)
    original[:, :3] = torch.randn(4, 3)
    exact = original.double()
    exact[:, :3] += 1e-7 * torch.randn(4, 3)
    reference = make_reference(original, exact=(exact,))
    wrong = original.clone()
    wrong[2, 1] += 0.5
    assert compare(reference, original.clone()).passed
    assert not compare(reference, wrong).passed


def test_large_results_are_not_taken_for_mask_values() -> None:
    original = torch.cat([torch.full((8,), -0.375), 1e6 * torch.arange(1.0, 9.0)])
    exact = original.double()
    exact[-1] += 80
    reference = make_reference(original, exact=(exact,))
    moved = original.clone()
    moved[-2] += 80
    assert compare(reference, moved).passed
    moved[-2] += 400
    assert not compare(reference, moved).passed


def test_out_of_memory_is_not_reported_as_a_wrong_result() -> None:
    reference = make_reference(torch.ones(3))
    with pytest.raises(ExportError, match="not enough memory to run the target on case case 0") as raised:
        ParityChecker(reference, measure_tolerances(reference, 4.0)).check(
            "pt2", lambda batch: {"y": torch.ones(1 << 50)}
        )
    assert raised.value.exit_code == 5
    assert raised.value.location == "pt2"


def test_argmax_agreement_is_the_share_of_rows_with_equal_argmax() -> None:
    reference = make_reference(torch.eye(4), torch.eye(4))
    assert compare(reference, torch.eye(4), torch.eye(4)[[1, 0, 2, 3]]).argmax_agreement == 0.75


def test_cosine_is_taken_from_the_worst_case() -> None:
    reference = make_reference(torch.ones(3), torch.ones(3))
    assert compare(reference, torch.ones(3), -torch.ones(3)).cosine == pytest.approx(-1.0)
    assert compare(reference, torch.ones(3), torch.zeros(3)).cosine == 0.0
    assert compare(reference, torch.ones(3), torch.ones(3)).cosine == 1.0


@pytest.mark.parametrize("make", [lambda: torch.tensor(1.5), lambda: torch.zeros(0, 4), lambda: torch.zeros(3, 0)])
def test_scalars_and_empty_outputs_compare(make: Callable[[], torch.Tensor]) -> None:
    reference = make_reference(make())
    checker = ParityChecker(reference, measure_tolerances(reference, 4.0, always_empty=["y"]))
    assert checker.check("here", lambda _: {"y": make()}).passed


def test_a_fixed_shape_file_is_checked_at_the_traced_shape_only() -> None:
    cases = tuple(Case(name, {"x": torch.ones(size)}) for name, size in [("traced", 2), ("data", 3), ("again", 2)])
    outputs = tuple({"y": case.batch["x"]} for case in cases)
    at_traced_shape = Reference(cases, outputs, outputs, "problem").at_traced_shape()
    assert [case.name for case in at_traced_shape.cases] == ["traced", "again"]
    assert len(at_traced_shape.outputs) == len(at_traced_shape.exact) == 2
    assert at_traced_shape.fallback == "problem"


def make_extreme(ordinary: float, unlike: float, *, noise: float) -> Reference:
    """Returns a reference with an ordinary and an extreme case, and relative noise."""
    reference = make_reference(torch.tensor([ordinary]), torch.tensor([unlike]))
    exact = tuple({"y": o["y"].double() * (1 + noise)} for o in reference.outputs)
    cases = (reference.cases[0], replace(reference.cases[1], extreme=True))
    return replace(reference, cases=cases, exact=exact)


def test_an_extreme_case_has_its_own_limit() -> None:
    reference = make_extreme(1.0, 1000.0, noise=1e-5)
    tolerance = measure_tolerances(reference, 4.0)["y"]
    assert tolerance.limit == pytest.approx(4e-5, rel=1e-2)
    assert tolerance.own_limits == {"case 1": pytest.approx(64e-2, rel=1e-2)}
    honest = compare(reference, torch.tensor([1.0]), torch.tensor([1000.02]))
    assert honest.passed
    assert honest.max_abs == pytest.approx(1e-5, rel=1e-2)
    wrong = compare(reference, torch.tensor([1.0]), torch.tensor([1001.0]))
    assert wrong.failure is not None
    assert wrong.failure.startswith("at case 1: ")


def test_integers_at_extreme_cases_must_match_if_float64_agrees() -> None:
    """A rule that turned `x > 0` into `x >= 0` passed, although it changed every result at zeros."""
    ordinary, extremes = torch.tensor([True, False]), torch.tensor([False, False])
    reference = make_reference(ordinary, extremes)
    reference = replace(reference, cases=(reference.cases[0], replace(reference.cases[1], extreme=True)))
    assert compare(reference, ordinary, extremes).passed
    failure = compare(reference, ordinary, ~extremes).failure
    assert failure is not None
    assert failure.startswith("at case 1: 2 of 2 values differ")
    unsure = replace(reference, exact=({"y": ordinary}, {"y": torch.tensor([True, False])}))
    assert compare(unsure, ordinary, ~extremes).passed


def test_an_extreme_case_without_noise_still_has_a_tolerance() -> None:
    reference = make_extreme(1.0, 3.2, noise=0.0)
    assert compare(reference, torch.tensor([1.0]), torch.tensor([3.2 + 7e-6])).passed


def test_a_noisy_extreme_case_is_checked_for_nan_and_shape_only() -> None:
    reference = make_extreme(1.0, 1e6, noise=1e-6)
    exact = ({"y": reference.exact[0]["y"]}, {"y": torch.tensor([5e5], dtype=torch.float64)})
    reference = replace(reference, exact=exact)
    assert measure_tolerances(reference, 4.0)["y"].own_limits == {"case 1": math.inf}
    assert compare(reference, torch.tensor([1.0]), torch.tensor([3e5])).passed
    assert not compare(reference, torch.tensor([1.0]), torch.tensor([math.nan])).passed
    assert not compare(reference, torch.tensor([1.0]), torch.tensor([1e6, 1e6])).passed


def test_each_target_is_compared_with_its_source_target() -> None:
    reference = make_reference(torch.ones(3))
    checker = ParityChecker(reference, measure_tolerances(reference, 4.0, atol=1.0))

    def gives(value: float) -> Callable[[Batch], Tensors]:
        return lambda _: {"y": torch.full((3,), value)}

    for target, value in ((GRAPH, 1.25), (ONNX, 1.25), (ONNX_OPTIMIZED, 1.75), ("pt2", 1.0)):
        checker.check(target, gives(value))
    steps = {target.target: (target.made_from, target.outputs[0].step) for target in checker.targets}
    assert steps == {
        "original": ("original", 0.0),
        "graph": ("original", 0.25),
        "onnx": ("graph", 0.0),
        "onnx-optimized": ("onnx", 0.5),
        "pt2": ("graph", 0.25),
    }


def test_a_single_extreme_case_is_compared() -> None:
    """Diagnosis checks one case at a time."""
    reference = make_extreme(1.0, 1000.0, noise=1e-5)
    checker = ParityChecker(reference.select([1]), measure_tolerances(reference, 4.0))
    assert checker.check("here", lambda _: {"y": torch.tensor([1000.0])}).passed
    assert not checker.check("there", lambda _: {"y": torch.tensor([2000.0])}).passed


def test_one_batch_of_large_values_hides_no_fault_in_others() -> None:
    usual = [torch.full((4,), 1.0 + index / 8) for index in range(3)]
    reference = make_reference(*usual, torch.full((4,), 1e5))
    exact = tuple({"y": outputs["y"].double() * (1 + 1e-7)} for outputs in reference.outputs)
    tolerances = measure_tolerances(replace(reference, exact=exact), 4.0)
    tolerance = tolerances["y"]
    assert tolerance.limit < 1e-5
    assert tolerance.own_limits == {reference.cases[3].name: pytest.approx(4 * 1e5 * MIN_FLOOR_ULPS * EPS, rel=0.5)}
    for wrong, fails in ((0, True), (3, False)):
        results = [tensor.clone() for tensor in (*usual, torch.full((4,), 1e5))]
        results[wrong][1] += 1e-3
        checker = ParityChecker(replace(reference, exact=exact), tolerances)
        checked = checker.check("graph", lambda batch, results=results: {"y": results[int(batch["index"])]})  # type: ignore[misc]
        assert checked.passed is not fails


def test_integers_decided_by_rounding_fail_with_the_reason() -> None:
    labels, float64_labels = torch.tensor([3, 4, 5, 6]), torch.tensor([3, 4, 5, 7])
    reference = replace(make_reference(labels), exact=({"y": float64_labels},))
    failure = compare(reference, torch.tensor([3, 9, 5, 6])).failure
    assert failure is not None
    assert (
        "1 of 4 values differ; the original in float64 differs from itself in 1 values, so they depend on round"
        in failure
    )
    plain = compare(make_reference(labels), float64_labels).failure
    assert plain is not None
    assert plain.endswith("1 of 4 values differ")
