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
from optexport.tracking.store import create_once

_NUMPY_NAMES = {"bool": "bool_"}


@dataclass(frozen=True)
class OnnxModel:
    """Parts of an MLflow ONNX model. External weights are loaded at the upload."""

    path: Path
    proto: Any
    signature: Any
    requirements: Sequence[str]


def read_onnx_model(bundle: BundleRecord) -> OnnxModel | None:
    """Returns the bundle's ONNX model for the CPU without its weights, or None.

    A model for a GPU is skipped: an MLflow model names execution providers but cannot turn off TF32.
    """
    import onnx

    files = (file for file in bundle.manifest.artifacts if (file.format, file.device) == ("onnx", "cpu"))
    if (record := next(files, None)) is None:
        return None
    path, versions = bundle.folder / record.path, bundle.manifest.versions
    # Explicit, because mlflow would load the model in another process to infer them.
    requirements = [f"{name}=={versions[name]}" for name in ("onnx", "onnxruntime", "mlflow")]
    return OnnxModel(path, onnx.load(path, load_external_data=False), model_signature(bundle.manifest), requirements)


def log_model(client: Any, run_id: str, onnx_model: OnnxModel, bundle: BundleRecord) -> str:
    """Returns the id of the run's logged model; creates or completes it if needed."""
    import mlflow.onnx
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus
    from mlflow.models import Model

    experiment = client.get_run(run_id).info.experiment_id

    oldest = {"field_name": "creation_timestamp", "ascending": True}

    def find_model() -> str | None:
        query = f"source_run_id = '{run_id}'"
        models = client.search_logged_models([experiment], filter_string=query, order_by=[oldest])
        return str(models[0].model_id) if models else None

    model_id = find_model() or create_once(
        lambda: str(client.create_logged_model(experiment, name="model", source_run_id=run_id).model_id),
        find_model,
        client.delete_logged_model,
    )
    model = client.get_logged_model(model_id)

    def find_output() -> bool | None:
        outputs = client.get_run(run_id).outputs
        return model_id in [output.model_id for output in (outputs.model_outputs if outputs else ())] or None

    if not find_output():
        create_once(lambda: client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)]), find_output)
    if model.status == LoggedModelStatus.READY:
        return model_id
    with tempfile.TemporaryDirectory(prefix="optexport-") as scratch:
        folder = Path(scratch) / "model"
        mlflow.onnx.save_model(
            _load_weights(onnx_model, bundle),
            folder,
            mlflow_model=Model(artifact_path=model.artifact_location, run_id=run_id, model_id=model_id),
            signature=onnx_model.signature,
            pip_requirements=onnx_model.requirements,
            onnx_execution_providers=[*bundle.settings.export.onnx.providers, "CPUExecutionProvider"],
            metadata={
                "optexport_version": bundle.manifest.optexport_version,
                "weights_sha256": bundle.manifest.model.weights_sha256,
            },
        )
        client.log_model_artifacts(model_id, str(folder))
        upload_check.check_upload(lambda path: client.list_logged_model_artifacts(model_id, path), folder)
    client.finalize_logged_model(model_id, "READY")
    return model_id


def _load_weights(onnx_model: OnnxModel, bundle: BundleRecord) -> Any:
    """Loads the weights of the ONNX model and checks its files against the manifest."""
    import onnx

    onnx.load_external_data_for_model(onnx_model.proto, str(onnx_model.path.parent))
    files = (onnx_model.path, onnx_model.path.with_name(f"{onnx_model.path.name}.data"))
    for record in bundle.manifest.files:
        if bundle.folder / record.path in files:
            digests.check_file(bundle.folder / record.path, record)
    return onnx_model.proto


def model_signature(manifest: Manifest) -> Any:
    """Returns the MLflow signature of a bundle, with -1 for each dynamic size.

    MLflow rejects arrays of another dtype. A served model receives JSON numbers, which take the dtype of the signature.
    """
    from mlflow.models import ModelSignature

    # A schema cannot be empty, and a model may have no inputs.
    return ModelSignature(_schema(manifest.inputs) if manifest.inputs else None, _schema(manifest.outputs))


def _schema(records: list[TensorRecord]) -> Any:
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
