"""Tests that rounding alone explains some small failures, and never a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexport.config.schema import ParityConfig
from optexport.parity import perturbation
from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference_run import run_original
from optexport.parity.target_check import TargetChecker
from optexport.signature.signature import Batch
from optexport.tracing.trace import trace
from tests.parity.network import EPS, Tensors, call


class Norm(nn.Module):
    """Amplifies rounding errors if the features of a row are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x * self.weight, [8], eps=1e-12)


# Products with 0.75 are exact, so the original is close to float64 here.
ALIKE = 1 + 2.0**-10 * (torch.arange(8) % 2)
STEEP = "steep"


@pytest.fixture
def checker() -> ParityChecker:
    torch.manual_seed(0)
    cases = [Case(f"batch {n}", {"x": torch.randn(n, 8)}) for n in range(1, 6)]
    reference = run_original(call, Norm(), [*cases, Case(STEEP, {"x": ALIKE[None]})])
    return ParityChecker(reference, measure_tolerances(reference, 4.0))


def _off(checker: ParityChecker, by: float, *cases: str) -> dict[str, Tensors]:
    """Returns the original's results, with an offset at some cases."""
    result = zip(checker.reference.cases, checker.reference.outputs, strict=True)
    return {case.name: {"y": outputs["y"] + by * (case.name in cases)} for case, outputs in result}


def _explained(checker: ParityChecker, results: dict[str, Tensors]) -> bool:
    """Returns True if failing results pass with the bounds of perturbed originals."""
    target = checker.check_results("onnx", list(results.values()))
    assert not target.passed
    raised = perturbation.find_raised_tolerances(checker, target, call, Norm(), 4.0, 0, checker.tolerances)
    if raised is None:
        return False
    assert raised["y"] == replace(checker.tolerances["y"], own_limits=raised["y"].own_limits)
    assert list(raised["y"].own_limits) == [STEEP]
    return ParityChecker(checker.reference, raised).check_results("onnx", list(results.values())).passed


def test_errors_of_perturbed_originals_are_explained(checker: ParityChecker) -> None:
    limit = checker.tolerances["y"].limit
    assert limit < 1e-4
    assert _explained(checker, _off(checker, 3 * limit, STEEP))


@pytest.mark.parametrize(
    ("times", "cases"), [(3, ["batch 3"]), (100, [STEEP]), (3, ["batch 2", STEEP]), (3, ["batch 1", "batch 2", STEEP])]
)
def test_larger_errors_and_ordinary_cases_are_not_explained(
    checker: ParityChecker, times: float, cases: list[str]
) -> None:
    assert not _explained(checker, _off(checker, times * checker.tolerances["y"].limit, *cases))


def test_nan_is_not_explained(checker: ParityChecker) -> None:
    assert not _explained(checker, _off(checker, torch.nan, STEEP))


def test_the_model_is_unchanged_and_exceptions_explain_nothing(checker: ParityChecker) -> None:
    model = Norm()
    before = model.weight.clone()

    def failing(model: nn.Module, batch: Batch) -> Tensors:
        raise RuntimeError("it does not run")

    target = checker.check_results("onnx", list(_off(checker, 3 * checker.tolerances["y"].limit, STEEP).values()))
    assert perturbation.find_raised_tolerances(checker, target, failing, model, 4.0, 0, checker.tolerances) is None
    assert perturbation.find_raised_tolerances(checker, target, call, model, 4.0, 0, checker.tolerances) is not None
    assert torch.equal(model.weight, before)


def test_a_configured_tolerance_is_never_raised(checker: ParityChecker) -> None:
    fixed = ParityChecker(checker.reference, measure_tolerances(checker.reference, 4.0, atol=EPS))
    target = fixed.check_results("onnx", list(_off(fixed, 1e-5, STEEP).values()))
    assert perturbation.find_raised_tolerances(fixed, target, call, Norm(), 4.0, 0, fixed.tolerances) is None


def _checked(checker: ParityChecker, by: float) -> TargetParity:
    """Returns the result of a target with an offset at the badly conditioned case."""
    results = {id(case.batch): _off(checker, by, STEEP)[case.name] for case in checker.reference.cases}
    signature = trace(Norm(), {"x": torch.randn(2, 8)}).signature
    target_checker = TargetChecker(checker, call, Norm(), signature, {}, ParityConfig())
    return target_checker.check("onnx", lambda: lambda batch: results[id(batch)])


def test_a_run_passes_explained_errors_and_records_the_case(checker: ParityChecker) -> None:
    limit = checker.tolerances["y"].limit
    assert _checked(checker, 3 * limit).passed
    assert checker.passed
    assert checker.tolerances["y"].limit == limit
    assert checker.reference.variations[-1] == "with weights moved by half a unit in the last place at steep"


def test_a_limit_raised_for_one_target_is_not_raised_for_others(checker: ParityChecker) -> None:
    """A small fault in the graph raised the limit for a larger fault in the file."""
    measured, limit = dict(checker.tolerances), checker.tolerances["y"].limit
    first = checker.check_results("graph", list(_off(checker, 3 * limit, STEEP).values()))
    raised = perturbation.find_raised_tolerances(checker, first, call, Norm(), 4.0, 0, measured)
    assert raised is not None
    assert raised["y"].own_limits[STEEP] <= 16 * limit
    checker.tolerances = raised
    other_target = checker.check_results("onnx", list(_off(checker, 3 * limit, "batch 1").values()))
    assert not other_target.passed
    assert perturbation.find_raised_tolerances(checker, other_target, call, Norm(), 4.0, 0, measured) is None
    farther = checker.check_results("pt2", list(_off(checker, 17 * limit, STEEP).values()))
    assert not farther.passed
    assert perturbation.find_raised_tolerances(checker, farther, call, Norm(), 4.0, 0, measured) is None


def test_a_file_with_few_cases_is_excused_at_no_case(checker: ParityChecker) -> None:
    """The share was computed over all cases of the run, so its only ordinary case was excused."""
    few = ParityChecker(checker.reference.select([0, 5]), checker.tolerances)
    target = few.check_results("torchscript", list(_off(few, 3 * checker.tolerances["y"].limit, STEEP).values()))
    assert not target.passed
    assert perturbation.find_raised_tolerances(checker, target, call, Norm(), 4.0, 0, checker.tolerances) is None


def test_a_run_fails_unexplained_errors_and_keeps_its_bounds(checker: ParityChecker) -> None:
    before, variations = dict(checker.tolerances), checker.reference.variations
    assert not _checked(checker, 100 * checker.tolerances["y"].limit).passed
    assert checker.tolerances == before
    assert checker.reference.variations == variations
