"""The ONNX file of a bundle as an MLflow logged model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.bundle import digests
from optexport.bundle.manifest import Manifest, TensorRecord
from optexport.tracking import upload_check
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.store import made_once

_NUMPY_NAMES = {"bool": "bool_"}


@dataclass(frozen=True)
class OnnxModel:
    """Parts of an MLflow ONNX model. External weights are loaded at the upload."""

    path: Path
    proto: Any
    signature: Any
    requirements: Sequence[str]


def onnx_model(finished: BundleRecord) -> OnnxModel | None:
    """Returns the bundle's ONNX model for the CPU without its weights, or None.

    A model for a GPU is skipped: an MLflow model names execution providers but cannot turn off TF32.
    """
    import onnx

    files = (file for file in finished.manifest.artifacts if (file.format, file.device) == ("onnx", "cpu"))
    if (record := next(files, None)) is None:
        return None
    path, versions = finished.folder / record.path, finished.manifest.versions
    # Explicit, because mlflow would load the model in another process to infer them.
    requirements = [f"{name}=={versions[name]}" for name in ("onnx", "onnxruntime", "mlflow")]
    return OnnxModel(path, onnx.load(path, load_external_data=False), signature(finished.manifest), requirements)


def logged_model(client: Any, run_id: str, made: OnnxModel, finished: BundleRecord) -> str:
    """Returns the id of the run's logged model; creates or completes it if needed."""
    import mlflow.onnx
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus
    from mlflow.models import Model

    experiment = client.get_run(run_id).info.experiment_id

    oldest = {"field_name": "creation_timestamp", "ascending": True}

    def known() -> str | None:
        query = f"source_run_id = '{run_id}'"
        made = client.search_logged_models([experiment], filter_string=query, order_by=[oldest])
        return str(made[0].model_id) if made else None

    model_id = known() or made_once(
        lambda: str(client.create_logged_model(experiment, name="model", source_run_id=run_id).model_id),
        known,
        client.delete_logged_model,
    )
    model = client.get_logged_model(model_id)

    def named() -> bool | None:
        outputs = client.get_run(run_id).outputs
        return model_id in [output.model_id for output in (outputs.model_outputs if outputs else ())] or None

    if not named():
        made_once(lambda: client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)]), named)
    if model.status == LoggedModelStatus.READY:
        return model_id
    with tempfile.TemporaryDirectory(prefix="optexport-") as scratch:
        folder = Path(scratch) / "model"
        mlflow.onnx.save_model(
            _proven(made, finished),
            folder,
            mlflow_model=Model(artifact_path=model.artifact_location, run_id=run_id, model_id=model_id),
            signature=made.signature,
            pip_requirements=made.requirements,
            onnx_execution_providers=["CPUExecutionProvider"],
            metadata={
                "optexport_version": finished.manifest.optexport_version,
                "weights_sha256": finished.manifest.model.weights_sha256,
            },
        )
        client.log_model_artifacts(model_id, str(folder))
        upload_check.check(lambda path: client.list_logged_model_artifacts(model_id, path), folder)
    client.finalize_logged_model(model_id, "READY")
    return model_id


def _proven(made: OnnxModel, finished: BundleRecord) -> Any:
    """Loads the weights of the ONNX model and checks its files against the manifest."""
    import onnx

    onnx.load_external_data_for_model(made.proto, str(made.path.parent))
    files = (made.path, made.path.with_name(f"{made.path.name}.data"))
    for record in finished.manifest.files:
        if finished.folder / record.path in files:
            digests.check_file(finished.folder / record.path, record)
    return made.proto


def signature(manifest: Manifest) -> Any:
    """Returns the MLflow signature of a bundle, with -1 for each dynamic size.

    MLflow rejects arrays of another dtype. JSON numbers, which a served model receives, have no dtype.
    """
    from mlflow.models import ModelSignature

    # A schema cannot be empty, and a model may have no inputs.
    return ModelSignature(schema(manifest.inputs) if manifest.inputs else None, schema(manifest.outputs))


def schema(records: list[TensorRecord]) -> Any:
    """Converts tensor records of a manifest to an MLflow schema."""
    import numpy as np
    from mlflow.types import Schema, TensorSpec

    return Schema(
        [
            TensorSpec(
                np.dtype(_NUMPY_NAMES.get(r.dtype, r.dtype)),
                # Dynamic sizes are strings.
                tuple(size if isinstance(size, int) else -1 for size in r.shape),
                r.name,
            )
            for r in records
        ]
    )
