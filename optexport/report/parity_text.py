"""Texts about a parity record that the terminal, JUnit, GitHub and HTML reports share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from optexport.bundle.parity_records import (
    CaseRecord,
    GateResultRecord,
    OutputRecord,
    ParityRecord,
    TargetRecord,
    atol_above_rounding,
)
from optexport.config.metrics import SHARES, counted_unit

_SHOWN_DATA_CASES = 4
# A tolerance above this share of an output's largest value accepts almost any result.
_USEFUL_SHARE = 0.1


def list_outputs(parity: ParityRecord) -> Iterator[tuple[TargetRecord, OutputRecord]]:
    """Yields every output with its target."""
    return ((target, output) for target in parity.targets for output in target.outputs)


def list_gate_results(parity: ParityRecord) -> Iterator[tuple[TargetRecord, GateResultRecord]]:
    """Yields the result of every gate, with its target."""
    return ((target, gate_result) for target in parity.targets for gate_result in target.gate_results)


def metric_title(gate_result: GateResultRecord) -> str:
    """Returns a metric's name and output."""
    return gate_result.measure if gate_result.output is None else f"{gate_result.measure} of {gate_result.output}"


def list_coarse_gates(parity: ParityRecord) -> list[str]:
    """Returns the gates on shares that count too few values to let one of them differ."""
    texts = []
    for gate in parity.targets[0].gate_results:
        if gate.measure in SHARES and gate.min < 1:
            needed = math.ceil(round(1 / (1 - gate.min), 6))
            if 0 < gate.count < needed:
                counted = f"{gate.count} {counted_unit(gate.measure)}"
                texts.append(f"{metric_title(gate)} of at least {gate.min:.15g} counts {counted} (needs {needed})")
    return texts


def find_failure(output: OutputRecord) -> str | None:
    """Returns the first failed case of an output and its reason, or None if it passed."""
    return next((f"at {case.case}: {case.failure}" for case in output.cases if case.failure is not None), None)


def find_worst_case(output: OutputRecord) -> CaseRecord:
    """Returns the case that uses most of an output's tolerance."""
    return max(output.cases, key=lambda case: (case.used_share or 0.0, case.distance or 0.0))


def tolerance_text(target: TargetRecord, output: OutputRecord, case: CaseRecord) -> str:
    """Returns the tolerance of a case, or what decides in its place."""
    if case.limit is not None:
        return f"{case.limit:.1e}"
    has_gate = any(gate_result.output in (None, output.output) for gate_result in target.gate_results)
    return "gates" if has_gate else "none"


def explain(parity: ParityRecord, output: OutputRecord) -> str:
    """Explains a failed output: which tolerance would pass, and the distance in noise floors."""
    if output.passing_atol is None:
        return "No tolerance would have passed."
    bound, multiple = parity.bounds[output.output], ""
    if output.floor_ratio is not None:
        reference = "the original" if bound.fixed else "float64"
        multiple = f" It is {output.floor_ratio:g} times as far from {reference} as the original is from float64."
    if bound.largest is not None and output.passing_atol > _USEFUL_SHARE * bound.largest:
        return (
            f"A tolerance that passes would prove nothing: it is more than {_USEFUL_SHARE:g} of the largest value, "
            f"{number_text(bound.largest)}.{multiple}"
        )
    return f"With {atol_text(parity, output)} against the original it would have passed.{multiple}"


def atol_text(parity: ParityRecord, output: OutputRecord) -> str:
    """Returns the smallest ``atol`` that an output would have passed with.

    If it failed a tolerance below its noise floor, this is at least the ``atol`` that the error message recommends.
    """
    if output.passing_atol is None:
        return "none"
    atol, bound = output.passing_atol, parity.bounds[output.output]
    if bound.fixed and bound.limit < bound.floor and find_failure(output) is not None:
        atol = max(atol, atol_above_rounding(bound.floor))
    return f"atol={atol:.2g}"


def number_text(value: float | None) -> str:
    """Returns a number with two digits."""
    return "-" if value is None else f"{value:.2g}"


def case_names(cases: Sequence[str]) -> str:
    """Returns the names of the cases as one text; shortens many data cases to a range."""
    data = [name for name in cases if name.startswith("data ")]
    if len(data) <= _SHOWN_DATA_CASES:
        return "; ".join(cases)
    data_range = f"{data[0]} to {data[-1].removeprefix('data ')}"
    return "; ".join(data_range if name == data[0] else name for name in cases if name == data[0] or name not in data)
