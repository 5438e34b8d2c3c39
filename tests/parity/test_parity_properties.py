"""Tests properties of the parity check that hold for any values."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from optexport.parity.cases.case import Case
from optexport.parity.checker import OutputParity, ParityChecker
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference import Reference


@st.composite
def references(draw: st.DrawFn) -> Reference:
    """Draws a reference with several cases of any scale, rounded as in float32."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = 10.0 ** draw(st.integers(-6, 6))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    exact = [scale * torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in sizes]
    noise = draw(st.sampled_from([0.0, 1e-7, 1e-4]))
    original = [(e + noise * scale * torch.randn(e.shape, generator=generator)).float() for e in exact]
    if noise == 0.0:
        exact = [o.double() for o in original]
    cases = tuple(Case(f"case {i}", {"i": torch.tensor(i)}) for i in range(len(sizes)))
    return Reference(cases, tuple({"y": o} for o in original), tuple({"y": e} for e in exact))


def judge(reference: Reference, candidate: list[torch.Tensor], multiple: float = 4.0, **fixed: float) -> OutputParity:
    tolerances = measure_tolerances(reference, multiple, **fixed)
    names = {case.name: value for case, value in zip(reference.cases, candidate, strict=True)}
    by_index = {int(case.batch["i"]): names[case.name] for case in reference.cases}
    (output,) = (
        ParityChecker(reference, tolerances).check("here", lambda batch: {"y": by_index[int(batch["i"])]}).outputs
    )
    return output


def perturbed(reference: Reference, share: float, data: st.DataObject) -> tuple[list[torch.Tensor], int]:
    """Returns the original's results with one element moved by a share of its limit, and the index of its case."""
    tolerance = measure_tolerances(reference, 4.0)["y"]
    candidate = [o["y"].double() for o in reference.outputs]
    index = data.draw(st.integers(0, len(candidate) - 1))
    row = data.draw(st.integers(0, candidate[index].shape[0] - 1))
    column = data.draw(st.integers(0, 2))
    sign = data.draw(st.sampled_from([-1, 1]))
    exact = reference.exact[index]["y"]
    candidate[index] = candidate[index].clone()
    candidate[index][row, column] = (exact + sign * share * tolerance.allowed("", exact.abs()))[row, column]
    return candidate, index


def as_double(reference: Reference) -> Reference:
    """Returns the reference in float64, so that added differences are not rounded away."""
    return Reference(reference.cases, tuple({"y": o["y"].double()} for o in reference.outputs), reference.exact)


@given(references(), st.floats(1.0, 100.0))
def test_the_original_always_passes(reference: Reference, multiple: float) -> None:
    output = judge(reference, [o["y"].clone() for o in reference.outputs], multiple)
    assert output.passed
    assert output.floor_ratio <= 1.0


@given(references(), st.floats(1.25, 1e6), st.data())
def test_a_fault_beyond_the_limit_is_always_caught(reference: Reference, share: float, data: Any) -> None:
    reference = as_double(reference)
    candidate, index = perturbed(reference, share, data)
    output = judge(reference, candidate)
    assert not output.passed
    assert str(output.failure).startswith(f"at case {index}: ")
    assert output.worst_case == f"case {index}"


@given(references(), st.data())
def test_a_result_of_the_wrong_sign_is_always_caught(reference: Reference, data: Any) -> None:
    candidate = [o["y"].clone() for o in reference.outputs]
    index = data.draw(st.integers(0, len(candidate) - 1))
    position = candidate[index].abs().argmax()
    candidate[index].view(-1)[position] *= -1
    assert not judge(reference, candidate).passed


@given(references(), st.floats(0.0, 0.8), st.data())
def test_a_difference_within_the_limit_passes(reference: Reference, share: float, data: Any) -> None:
    reference = as_double(reference)
    candidate, _ = perturbed(reference, share, data)
    assert judge(reference, candidate).passed


@given(references(), st.floats(0.1, 10.0), st.integers(-30, 30), st.data())
def test_a_change_of_unit_does_not_change_the_verdict(
    reference: Reference, share: float, power: int, data: Any
) -> None:
    reference = as_double(reference)
    candidate, _ = perturbed(reference, share, data)
    unit = 2.0**power
    scaled = Reference(
        reference.cases,
        tuple({"y": o["y"] * unit} for o in reference.outputs),
        tuple({"y": e["y"] * unit} for e in reference.exact),
    )
    before, after = judge(reference, candidate), judge(scaled, [value * unit for value in candidate])
    assert before.passed == after.passed
    assert math.isclose(after.max_abs, before.max_abs * unit, rel_tol=1e-9)
    assert after.worst_case == before.worst_case


@given(references(), st.floats(0.1, 10.0), st.data())
def test_the_order_of_the_cases_does_not_change_the_verdict(reference: Reference, share: float, data: Any) -> None:
    reference = as_double(reference)
    candidate, _ = perturbed(reference, share, data)
    order = data.draw(st.permutations(range(len(candidate))))
    permuted = Reference(
        tuple(reference.cases[i] for i in order),
        tuple(reference.outputs[i] for i in order),
        tuple(reference.exact[i] for i in order),
    )
    before, after = judge(reference, candidate), judge(permuted, [candidate[i] for i in order])
    assert (before.passed, before.max_abs, before.floor, before.passing_atol) == (
        after.passed,
        after.max_abs,
        after.floor,
        after.passing_atol,
    )
    assert math.isclose(before.argmax_agreement, after.argmax_agreement)


@given(references(), st.floats(0.1, 10.0), st.data())
def test_more_cases_never_let_a_fault_through(reference: Reference, share: float, data: Any) -> None:
    """An added exact case with no larger values must not change the verdict."""
    reference = as_double(reference)
    candidate, _ = perturbed(reference, share, data)
    again = {"y": reference.exact[0]["y"].clone()}
    more = Reference(
        (*reference.cases, Case("more", {"i": torch.tensor(99)})),
        (*reference.outputs, again),
        (*reference.exact, again),
    )
    assert judge(more, [*candidate, again["y"].clone()]).passed == judge(reference, candidate).passed


@given(references(), st.floats(0.001, 100.0), st.data())
def test_a_fixed_tolerance_catches_only_larger_differences(reference: Reference, atol: float, data: Any) -> None:
    reference = as_double(reference)
    for share, passes in ((0.99, True), (1.01, False)):
        candidate = [o["y"].clone() for o in reference.outputs]
        index = data.draw(st.integers(0, len(candidate) - 1))
        scale = float(candidate[index].abs().max()) or 1.0
        candidate[index][0, 0] += share * atol * scale
        assert judge(reference, candidate, atol=atol * scale).passed is passes


@given(references(), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_single_nan_or_infinity_is_always_caught(reference: Reference, value: float, data: Any) -> None:
    candidate = [o["y"].clone() for o in reference.outputs]
    index = data.draw(st.integers(0, len(candidate) - 1))
    row = data.draw(st.integers(0, candidate[index].shape[0] - 1))
    candidate[index][row, data.draw(st.integers(0, 2))] = value
    assert str(judge(reference, candidate, atol=1e30).failure).startswith(f"at case {index}: 1 elements")
