"""Bundles to upload to MLflow, copied from one export with edited documents."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Run

from tests._helpers import exports

# Ignores warnings of mlflow and of its dependencies.
QUIET = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::UserWarning:mlflow"),
]

_COUNT = itertools.count()
HOST = {"host": "here", "processor": "a processor", "cpus": 2}

Change = Callable[[dict[str, Any]], object]


def bundle(
    folder: Path, *, manifest: Change = lambda document: None, measurements: Change = lambda document: None
) -> Path:
    """Returns a copy of the block's bundle as a separate run, with edited and sealed documents."""
    target = folder / f"bundle-{next(_COUNT)}"
    shutil.copytree(exports.exported().output, target)
    exports.edit_json(target / "manifest.json", manifest)

    def change(document: dict[str, Any]) -> None:
        document |= {**HOST, "host": "here"}
        document["seconds"]["trace"] = next(_COUNT)
        measurements(document)

    exports.edit_json(target / "measurements.json", change)
    return target


def registering(name: str = "block", **max_regression: float) -> Change:
    """Returns a change that makes the bundle's config register its model."""
    settings = {"name": name, "alias": "champion", "max_regression": max_regression}
    return lambda document: document["config"].update(register=settings)


def timed(low: float, high: float, **more: Any) -> Change:
    """Returns a change that records how long the ONNX file took, in milliseconds."""

    def change(document: dict[str, Any]) -> None:
        row = {"artifact": "onnx", "format": "onnx", "shape": "batch=1", "p50_ms": (low + high) / 2}
        row |= {"low_ms": low, "high_ms": high, "p90_ms": high, "p99_ms": high, "rows_per_second": 1.0}
        row |= {"load_seconds": 0.1, "peak_memory_bytes": None}
        document["bench"] = {
            "threads": 1,
            "rounds": 20,
            "artifacts": [{"name": "onnx", "format": "onnx", "bytes": 1000, "proven": True}],
            "figures": [row],
            "comparisons": [],
            "notes": [],
        }
        document |= more

    return change


def gate_result(measure: str) -> dict[str, Any]:
    """Returns the record of a passed gate on a metric."""
    values = {"value": 0.75, "mean": 0.75, "low": None, "high": None, "count": 4, "ties": 0, "min": 0.5}
    return {"measure": measure, "output": None, **values, "failure": None, "cases": []}


def runs(uri: str, experiment: str | None = None) -> list[Run]:
    """Returns the runs of an experiment, by default of all."""
    client = mlflow.MlflowClient(uri)
    ids = [one.experiment_id for one in client.search_experiments() if experiment in (None, one.name)]
    return list(client.search_runs(ids)) if ids else []


def only_run(uri: str) -> Run:
    """Returns the only run of the experiment that projects of `tests._helpers.stores` use."""
    (run,) = runs(uri, "tracked")
    return run
