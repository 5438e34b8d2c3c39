"""Data of a bundle for MLflow, built and validated before the upload starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optexport._utils.plots import plot_file
from optexport.bundle.layout import REFERENCE, REPORT
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import BenchRecord
from optexport.errors import BundleError, describe_error
from optexport.tracking import run_metrics, run_params, tables
from optexport.tracking.bundle_record import BUNDLE, BundleRecord
from optexport.tracking.description import describe_bundle
from optexport.tracking.model import OnnxModel, read_onnx_model
from optexport.tracking.run_metrics import Metric
from optexport.tracking.tables import TABLES

# safetensors dtypes that NumPy lacks.
_DTYPES_NOT_IN_NUMPY = ("BF16", "F8_E4M3", "F8_E5M2")
# More bars are unreadable; the tables list all rows.
_MAX_BARS = 40


@dataclass(frozen=True)
class RunPayload:
    """Data that an upload sends in addition to the bundle's files.

    Attributes:
        bundle: The bundle.
        description: The description of the run, as Markdown.
        params: The params of the run.
        metrics: The name, value and step of each metric.
        datasets: The MLflow dataset inputs of the run.
        tables: The JSON tables on the run's page, by file name.
        files: The other files on the run's page, outside of the bundle, by file name.
        model: The ONNX model; None if the bundle has no ONNX file for the CPU.
    """

    bundle: BundleRecord
    description: str
    params: Mapping[str, str]
    metrics: Sequence[Metric]
    datasets: Sequence[Any]
    tables: Mapping[str, bytes]
    files: Mapping[str, bytes]
    model: OnnxModel | None


def build_payload(bundle: BundleRecord) -> RunPayload:
    """Builds everything that MLflow receives for a bundle.

    Raises:
        BundleError: The content of the bundle cannot be converted. Another attempt does not help.
    """
    try:
        files = _files(bundle)
        return RunPayload(
            bundle,
            describe_bundle(bundle, [*files, BUNDLE, TABLES]),
            run_params.params(bundle.manifest.config),
            run_metrics.bundle_metrics(bundle),
            _datasets(bundle),
            tables.bundle_tables(bundle),
            files,
            read_onnx_model(bundle),
        )
    except BundleError:
        raise
    except Exception as error:  # a document with a valid digest may still contain unexpected values
        raise BundleError(
            f"the bundle cannot be converted for MLflow ({describe_error(error)})",
            location=str(bundle.folder),
        ) from error


def _files(bundle: BundleRecord) -> dict[str, bytes]:
    plots = {name: plot_file(figure, "png") for name, figure in draw_figures(bundle).items()}
    names = [name for name in ("config.toml", REPORT) if (bundle.folder / name).is_file()]
    return plots | {name: (bundle.folder / name).read_bytes() for name in names}


def _datasets(bundle: BundleRecord) -> list[Any]:
    """Returns the traced and user-supplied inputs as MLflow datasets, each with name, digest and shapes.

    The tensors themselves are in the bundle only.
    """
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.data.numpy_dataset import from_numpy
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT
    from safetensors import safe_open

    inputs = []
    # By default mlflow records the path of this program on this machine.
    source = CodeDatasetSource({"file": f"{BUNDLE}/{REFERENCE}", **bundle.identity})
    with safe_open(bundle.folder / REFERENCE, framework="np") as file:
        for index, case in enumerate(bundle.manifest.reference_cases):
            if not re.fullmatch(r"traced|data( \d+)?", case):
                continue
            prefix = f"{index}.inputs."
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - not a mapping
            if not names or any(file.get_slice(name).get_dtype() in _DTYPES_NOT_IN_NUMPY for name in names):
                continue
            features = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
            dataset = from_numpy(features, source=source, name=case)
            context = InputTag(MLFLOW_DATASET_CONTEXT, "parity")
            inputs.append(DatasetInput(Dataset(**dataset.to_dict()), [context]))
    return inputs


def draw_figures(bundle: BundleRecord) -> dict[str, Any]:
    """Returns Matplotlib figures of parity and latency by file name; a figure without data is omitted."""
    figures = {
        "parity.png": _draw_parity(bundle.manifest),
        "latency.png": _draw_latency(bundle.measurements.bench),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _draw_parity(manifest: Manifest) -> Any:
    """Draws distances as multiples of the noise floor, for outputs that have one."""
    rows = [
        (f"{target.title}: {output.output}", output.floor_ratio)
        for target in manifest.parity.targets
        for output in target.outputs
        if output.floor_ratio
    ][:_MAX_BARS]
    if not rows:
        return None
    figure, axes = _new_figure([name for name, _ in rows], "distance from float64, in noise floors")
    axes.barh(range(len(rows)), [multiple for _, multiple in rows], color="tab:blue")
    axes.axvline(1.0, color="grey", linewidth=1)
    return figure


def _draw_latency(bench: BenchRecord | None) -> Any:
    if bench is None or not bench.figures:
        return None
    rows = bench.figures[:_MAX_BARS]
    names = [f"{row.artifact} at {row.shape}" for row in rows]
    figure, axes = _new_figure(names, "milliseconds per call: median with 95 % interval")
    for index, row in enumerate(rows):
        if row.low_ms is not None and row.high_ms is not None:
            axes.plot([row.low_ms, row.high_ms], [index, index], color="tab:blue", linewidth=4)
        axes.plot([row.p50_ms], [index], "o", color="black", markersize=3)
    axes.set_xlim(left=0)
    return figure


def _new_figure(names: Sequence[str], label: str) -> tuple[Any, Any]:
    """Creates a figure with one row per name, first name at the top."""
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(8, 1 + 0.25 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)  # a dollar sign in a name is not math
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=8)
    return figure, axes
