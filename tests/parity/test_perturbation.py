"""Tests that rounding alone explains some small failures, and never a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexport.config.schema import ParityConfig
from optexport.parity import perturbation
from optexport.parity.candidate_check import CandidateChecker
from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.noise_floor import bounds
from optexport.parity.reference_run import run_original
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
def proof() -> ParityChecker:
    torch.manual_seed(0)
    cases = [Case(f"batch {n}", {"x": torch.randn(n, 8)}) for n in range(1, 6)]
    reference = run_original(call, Norm(), [*cases, Case(STEEP, {"x": ALIKE[None]})])
    return ParityChecker(reference, bounds(reference, 4.0))


def _off(proof: ParityChecker, by: float, *cases: str) -> dict[str, Tensors]:
    """Returns the original's results, with an offset at some cases."""
    given = zip(proof.reference.cases, proof.reference.outputs, strict=True)
    return {case.name: {"y": outputs["y"] + by * (case.name in cases)} for case, outputs in given}


def _explained(proof: ParityChecker, results: dict[str, Tensors]) -> bool:
    """Returns True if failing results pass with the bounds of perturbed originals."""
    target = proof.check_results("onnx", list(results.values()))
    assert not target.passed
    found = perturbation.find_raised_tolerances(proof, target, call, Norm(), 4.0, 0, proof.tolerances)
    if found is None:
        return False
    assert found["y"] == replace(proof.tolerances["y"], extremes=found["y"].extremes)
    assert list(found["y"].extremes) == [STEEP]
    return ParityChecker(proof.reference, found).check_results("onnx", list(results.values())).passed


def test_errors_of_perturbed_originals_are_explained(proof: ParityChecker) -> None:
    limit = proof.tolerances["y"].limit
    assert limit < 1e-4
    assert _explained(proof, _off(proof, 3 * limit, STEEP))


@pytest.mark.parametrize(
    ("times", "cases"), [(3, ["batch 3"]), (100, [STEEP]), (3, ["batch 2", STEEP]), (3, ["batch 1", "batch 2", STEEP])]
)
def test_larger_errors_and_ordinary_cases_are_not_explained(
    proof: ParityChecker, times: float, cases: list[str]
) -> None:
    assert not _explained(proof, _off(proof, times * proof.tolerances["y"].limit, *cases))


def test_nan_is_not_explained(proof: ParityChecker) -> None:
    assert not _explained(proof, _off(proof, torch.nan, STEEP))


def test_the_model_is_unchanged_and_exceptions_explain_nothing(proof: ParityChecker) -> None:
    model = Norm()
    before = model.weight.clone()

    def failing(model: nn.Module, batch: Batch) -> Tensors:
        raise RuntimeError("it does not run")

    target = proof.check_results("onnx", list(_off(proof, 3 * proof.tolerances["y"].limit, STEEP).values()))
    assert perturbation.find_raised_tolerances(proof, target, failing, model, 4.0, 0, proof.tolerances) is None
    assert perturbation.find_raised_tolerances(proof, target, call, model, 4.0, 0, proof.tolerances) is not None
    assert torch.equal(model.weight, before)


def test_a_configured_tolerance_is_never_raised(proof: ParityChecker) -> None:
    fixed = ParityChecker(proof.reference, bounds(proof.reference, 4.0, atol=EPS))
    target = fixed.check_results("onnx", list(_off(fixed, 1e-5, STEEP).values()))
    assert perturbation.find_raised_tolerances(fixed, target, call, Norm(), 4.0, 0, fixed.tolerances) is None


def _checked(proof: ParityChecker, by: float) -> TargetParity:
    """Returns the result of a target with an offset at the badly conditioned case."""
    results = {id(case.batch): _off(proof, by, STEEP)[case.name] for case in proof.reference.cases}
    signature = trace(Norm(), {"x": torch.randn(2, 8)}).signature
    candidate_checker = CandidateChecker(proof, call, Norm(), signature, {}, ParityConfig())
    return candidate_checker.check("onnx", lambda: lambda batch: results[id(batch)])


def test_a_run_passes_explained_errors_and_records_the_case(proof: ParityChecker) -> None:
    limit = proof.tolerances["y"].limit
    assert _checked(proof, 3 * limit).passed
    assert proof.passed
    assert proof.tolerances["y"].limit == limit
    assert proof.reference.ways[-1] == "with weights moved by half their last bit at steep"


def test_a_limit_raised_for_one_target_is_not_raised_for_others(proof: ParityChecker) -> None:
    """A small fault in the graph raised the limit for a larger fault in the file."""
    measured, limit = dict(proof.tolerances), proof.tolerances["y"].limit
    first = proof.check_results("graph", list(_off(proof, 3 * limit, STEEP).values()))
    found = perturbation.find_raised_tolerances(proof, first, call, Norm(), 4.0, 0, measured)
    assert found is not None
    assert found["y"].extremes[STEEP] <= 16 * limit
    proof.tolerances = found
    others = proof.check_results("onnx", list(_off(proof, 3 * limit, "batch 1").values()))
    assert not others.passed
    assert perturbation.find_raised_tolerances(proof, others, call, Norm(), 4.0, 0, measured) is None
    farther = proof.check_results("pt2", list(_off(proof, 17 * limit, STEEP).values()))
    assert not farther.passed
    assert perturbation.find_raised_tolerances(proof, farther, call, Norm(), 4.0, 0, measured) is None


def test_a_file_with_few_cases_is_excused_at_no_case(proof: ParityChecker) -> None:
    """The share was computed over all cases of the run, so its only ordinary case was excused."""
    few = ParityChecker(proof.reference.select([0, 5]), proof.tolerances)
    target = few.check_results("torchscript", list(_off(few, 3 * proof.tolerances["y"].limit, STEEP).values()))
    assert not target.passed
    assert perturbation.find_raised_tolerances(proof, target, call, Norm(), 4.0, 0, proof.tolerances) is None


def test_a_run_fails_unexplained_errors_and_keeps_its_bounds(proof: ParityChecker) -> None:
    before, ways = dict(proof.tolerances), proof.reference.ways
    assert not _checked(proof, 100 * proof.tolerances["y"].limit).passed
    assert proof.tolerances == before
    assert proof.reference.ways == ways
