"""The result of a run as the JSON document of ``--json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from optexport.bench import report
from optexport.report import tuning
from optexport.result import RunData


def as_json(result: RunData) -> dict[str, Any]:
    """Returns the result as the document of ``--json``."""
    return {
        "passed": result.passed,
        "exit_code": 0 if result.failure is None else result.failure.exit_code,
        "error": None if result.failure is None else str(result.failure),
        "tune": tuning.as_json(result.tuned),
        "output": str(result.output),
        "baseline": None if result.baseline is None else str(result.baseline),
        "files": {name: str(path) for name, path in result.files.items()},
        "transformed_nodes": result.transformed_nodes,
        "removed_nodes": result.removed_nodes,
        "near_misses": {t.rule: [miss.model_dump() for miss in t.near_misses] for t in result.manifest.transformations},
        "parity": result.manifest.parity.model_dump(mode="json"),
        "bench": None if result.bench is None else report.as_json(result.bench),
        "mlflow_run_id": result.run_id,
        "registered": None if result.registered is None else asdict(result.registered),
        "tracking_failure": None if result.tracking_failure is None else str(result.tracking_failure),
    }
