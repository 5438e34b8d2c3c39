"""All that MLflow is told of a bundle, made once: what was found to be tellable, before anything is sent, is sent."""

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
    """What is sent of a bundle, beside its files.

    Attributes:
        metrics: Name, value and step of each.
        datasets: MLflow's inputs of a run.
        tables, others: The files that are seen at once on the page of a run, outside of its bundle, by their names.
        model: None without an ONNX file.
    """

    finished: BundleRecord
    params: Mapping[str, str]
    metrics: Sequence[tuple[str, float, int]]
    datasets: Sequence[Any]
    tables: Mapping[str, bytes]
    others: Mapping[str, bytes]
    model: OnnxModel | None


def build_payload(finished: BundleRecord) -> RunPayload:
    """Makes all that MLflow is to be told of a bundle.

    Raises:
        BundleError: It cannot be made: the bundle is at fault, and no store that will answer later.
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
    except Exception as error:  # documents that were sealed by others may hold anything that their form allows
        told = f"{type(error).__name__}: {first_line(error)}"
        raise BundleError(f"MLflow cannot be told of it: {told}", location=str(finished.folder)) from error


def _others(finished: BundleRecord) -> dict[str, bytes]:
    found = {name: plot_file(figure, "png") for name, figure in figures(finished).items()}
    copied = [name for name in ("config.toml", REPORT) if (finished.folder / name).is_file()]
    return found | {name: (finished.folder / name).read_bytes() for name in copied}
