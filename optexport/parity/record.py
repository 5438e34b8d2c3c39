"""Conversion of parity results into the record in the manifest, the source of all reports."""

from __future__ import annotations

import math

from optexport.bundle.parity_records import (
    CaseMetricRecord,
    CaseRecord,
    GateRecord,
    GateResultRecord,
    OutputRecord,
    ParityRecord,
    TargetRecord,
    ToleranceRecord,
)
from optexport.parity import distances
from optexport.parity.checker import OutputParity, ParityChecker
from optexport.parity.gates import GateResult
from optexport.parity.noise_floor import Tolerance
from optexport.parity.reference import Reference


def parity_record(checker: ParityChecker) -> ParityRecord:
    """Returns the manifest's record of all comparisons, with distances rounded to three digits."""
    return ParityRecord(
        cases=[case.name for case in checker.reference.cases],
        extreme_cases=[case.name for case in checker.reference.cases if case.extreme],
        bounds={name: _tolerance(name, tolerance, checker.reference) for name, tolerance in checker.tolerances.items()},
        ways=list(checker.reference.variations),
        fallback=checker.reference.fallback,
        unguided=list(checker.reference.float64_mismatches),
        left_out=list(checker.reference.skipped),
        gates=[
            GateRecord(
                measure=gate.measure,
                output=gate.output,
                min=gate.min,
                k=gate.k,
                classes=gate.classes,
                slack=gate.slack,
                cases=list(gate.cases),
                is_user_data=gate.is_user_data,
            )
            for gate in checker.gates
        ],
        targets=[
            TargetRecord(
                target=target.target,
                made_from=target.made_from,
                outputs=[_output(output) for output in target.outputs],
                gate_results=[_gate_result(gate_result) for gate_result in target.gate_results],
                precision=target.precision,
            )
            for target in checker.targets
        ],
    )


def _tolerance(name: str, tolerance: Tolerance, reference: Reference) -> ToleranceRecord:
    extremes = {case: limit if math.isfinite(limit) else None for case, limit in tolerance.own_limits.items()}
    cases = zip(reference.cases, reference.outputs, strict=True)
    ordinary = [outputs[name] for case, outputs in cases if case.name not in tolerance.own_limits]
    largest = max((distances.max_magnitude(tensor) for tensor in ordinary), default=0.0)
    return ToleranceRecord(
        floor=tolerance.floor,
        limit=tolerance.limit,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        extremes=extremes,
        largest=_rounded(largest),
    )


def _output(output: OutputParity) -> OutputRecord:
    return OutputRecord(
        output=output.output,
        max_abs=_rounded(output.max_abs),
        max_rel=_rounded(output.max_rel),
        cosine=round(output.cosine, 9),
        floor_ratio=_rounded(output.floor_ratio),
        step=_rounded(output.step),
        argmax_agreement=output.argmax_agreement,
        passing_atol=_rounded(output.passing_atol),
        worst_case=output.worst_case,
        cases=[
            CaseRecord(case=c.case, distance=_rounded(c.distance), limit=_rounded(c.limit), failure=c.failure)
            for c in output.cases
        ],
    )


def _gate_result(gate_result: GateResult) -> GateResultRecord:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return GateResultRecord(
        measure=gate_result.gate.measure,
        output=gate_result.gate.output,
        value=number(gate_result.value),
        mean=number(gate_result.mean),
        low=gate_result.low,
        high=gate_result.high,
        count=gate_result.count,
        ties=gate_result.ties,
        min=gate_result.gate.min,
        failure=gate_result.failure,
        cases=[
            CaseMetricRecord(case=c.case, total=c.total, smallest=number(c.smallest), count=c.count)
            for c in gate_result.cases
        ],
    )


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return rounded if math.isfinite(rounded := float(f"{value:.3g}")) else value  # rounding up may overflow
