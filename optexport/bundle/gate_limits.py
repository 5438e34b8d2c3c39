"""The limits of ``[gate]`` beside the measured values, for the terminal, the reports and MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord
from optexport.bundle.outcomes import PYTORCH


@dataclass(frozen=True)
class GateLimit:
    """A limit of ``[gate]`` for the file of one format.

    Attributes:
        gate: The key in ``[gate]``.
        format: The format of the file.
        value: The worst measured value, in the unit of the gate.
        bound: The limit in words, such as ``at most 3``.
    """

    gate: str
    format: str
    value: float
    bound: str

    @property
    def value_text(self) -> str:
        """The value with four digits."""
        return f"{self.value:.4g}"

    @property
    def text(self) -> str:
        """The limit on one line."""
        return f"gate {self.gate}, {self.format}: {self.value_text} of {self.bound}"


def list_gate_limits(manifest: Manifest, bench: BenchRecord | None) -> Iterator[GateLimit]:
    """Yields each limit of the config's ``[gate]`` for each file, with the worst measured value."""
    sizes = {str(artifact.format): manifest.size_of(artifact) / 1e6 for artifact in manifest.artifacts}
    latencies, speedups = dict[str, float](), dict[str, float]()
    if bench is not None:
        # Candidates and the plain export are measured too.
        names = {file.name: file.format for file in bench.artifacts if file.proven}
        for figure in (figure for figure in bench.figures if figure.artifact in names):
            latencies[figure.format] = max(figure.p50_ms, latencies.get(figure.format, 0.0))
        for row in bench.comparisons:
            if row.artifact not in names or row.baseline == PYTORCH:
                continue
            name = names[row.artifact]
            speedups[name] = min(row.low, speedups.get(name, row.low))
    for gate, values, bound in (
        ("max_size_mb", sizes, "at most"),
        ("max_latency_ms", latencies, "at most"),
        ("min_speedup", speedups, "at least"),
    ):
        for name, value in values.items():
            if (limit := _find_limit(manifest, gate, name)) is not None:
                yield GateLimit(gate, name, value, f"{bound} {limit:g}")


def _find_limit(manifest: Manifest, gate: str, file_format: str) -> float | None:
    """Returns a limit of the config; None without one. A manifest may come from a stranger or another version."""
    table = manifest.config.get("gate")
    limits = table.get(gate) if isinstance(table, dict) else None
    for name in (file_format, "every"):
        limit = limits.get(name) if isinstance(limits, dict) else None
        if isinstance(limit, int | float):
            return limit
    return None
