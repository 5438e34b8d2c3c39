"""The limits of ``[gate]`` that a run met."""

from __future__ import annotations

from optexport.bench.report import as_json
from optexport.bundle import gate_limits
from optexport.bundle.gate_limits import GateLimit
from optexport.bundle.measurements import BenchRecord
from optexport.result import RunData


def list_gate_limits(result: RunData) -> list[GateLimit]:
    """Returns the limits of a run beside the measured values."""
    bench = None if result.bench is None else BenchRecord.model_validate(as_json(result.bench))
    return list(gate_limits.list_gate_limits(result.manifest, bench))
