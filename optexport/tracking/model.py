"""The ONNX file as a model of MLflow's, which is loaded, served and registered by name."""

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
    """What MLflow's model is made of; weights that lie beside the file are read when they are sent."""

    path: Path
    proto: Any
    signature: Any
    requirements: Sequence[str]


def onnx_model(finished: BundleRecord) -> OnnxModel | None:
    """The ONNX file of a bundle, as far as it can be sent as a model; None where it has none.

    One for a card is none: MLflow's models name providers, and not that these are to compute without TF32.
    """
    import onnx

    files = (file for file in finished.manifest.artifacts if (file.format, file.device) == ("onnx", "cpu"))
    if (record := next(files, None)) is None:
        return None
    path, versions = finished.folder / record.path, finished.manifest.versions
    # Named, because finding them out would load the model in a process of its own.
    requirements = [f"{name}=={versions[name]}" for name in ("onnx", "onnxruntime", "mlflow")]
    return OnnxModel(path, onnx.load(path, load_external_data=False), signature(finished.manifest), requirements)


def logged_model(client: Any, run_id: str, made: OnnxModel, finished: BundleRecord) -> str:
    """The id of the run's model, which is logged, or completed, where that was not done yet."""
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
    """The ONNX model with its weights, whose bytes are those that were proven.

    Raises:
        BundleError: They are not.
    """
    import onnx

    onnx.load_external_data_for_model(made.proto, str(made.path.parent))
    files = (made.path, made.path.with_name(f"{made.path.name}.data"))
    for record in finished.manifest.files:
        if finished.folder / record.path in files:
            digests.check_file(finished.folder / record.path, record)
    return made.proto


def signature(manifest: Manifest) -> Any:
    """Inputs and outputs as MLflow writes them, dynamic sizes as -1.

    MLflow refuses arrays of another dtype; numbers in JSON, as a served model gets them, have none.
    """
    from mlflow.models import ModelSignature

    # A schema cannot be empty, and a model may take no inputs.
    return ModelSignature(schema(manifest.inputs) if manifest.inputs else None, schema(manifest.outputs))


def schema(records: list[TensorRecord]) -> Any:
    """The records of a manifest as MLflow's schema."""
    import numpy as np
    from mlflow.types import Schema, TensorSpec

    return Schema(
        [
            TensorSpec(
                np.dtype(_NUMPY_NAMES.get(r.dtype, r.dtype)),
                # A size that is not a number is dynamic.
                tuple(size if isinstance(size, int) else -1 for size in r.shape),
                r.name,
            )
            for r in records
        ]
    )
