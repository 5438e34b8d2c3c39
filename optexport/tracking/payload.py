"""Data of a bundle for MLflow, built and validated before the upload starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optexport._utils.plots import plot_file
from optexport.bundle.layout import REPORT
from optexport.errors import BundleError, first_line
from optexport.tracking import run_params
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.datasets import datasets
from optexport.tracking.figures import figures
from optexport.tracking.model import OnnxModel, onnx_model
from optexport.tracking.tables import tables


@dataclass(frozen=True)
class RunPayload:
    """Data that an upload sends in addition to the bundle's files.

    Attributes:
        finished: The bundle.
        params: The params of the run.
        metrics: The name, value and step of each metric.
        datasets: The MLflow dataset inputs of the run.
        tables: The JSON tables on the run's page, by file name.
        others: The other files on the run's page, outside of the bundle, by file name.
        model: The ONNX model; None if the bundle has no ONNX file for the CPU.
    """

    finished: BundleRecord
    params: Mapping[str, str]
    metrics: Sequence[tuple[str, float, int]]
    datasets: Sequence[Any]
    tables: Mapping[str, bytes]
    others: Mapping[str, bytes]
    model: OnnxModel | None


def build_payload(finished: BundleRecord) -> RunPayload:
    """Builds everything that MLflow receives for a bundle.

    Raises:
        BundleError: The content of the bundle cannot be converted. Another attempt does not help.
    """
    try:
        return RunPayload(
            finished,
            run_params.params(finished.manifest.config),
            [
                *((name, value, 0) for name, value in run_params.metrics(finished).items()),
                *run_params.steps(finished.manifest),
            ],
            datasets(finished),
            {name: json.dumps(dict(table), indent=2).encode() for name, table in tables(finished).items()},
            _others(finished),
            onnx_model(finished),
        )
    except BundleError:
        raise
    except Exception as error:  # a document with a valid digest may still contain unexpected values
        told = f"{type(error).__name__}: {first_line(error)}"
        raise BundleError(f"MLflow cannot be told of it: {told}", location=str(finished.folder)) from error


def _others(finished: BundleRecord) -> dict[str, bytes]:
    found = {name: plot_file(figure, "png") for name, figure in figures(finished).items()}
    copied = [name for name in ("config.toml", REPORT) if (finished.folder / name).is_file()]
    return found | {name: (finished.folder / name).read_bytes() for name in copied}
