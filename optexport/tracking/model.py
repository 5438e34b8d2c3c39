"""The ONNX file as a model of MLflow's, which is loaded, served and registered by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from optexport.bundle.manifest import Manifest, TensorRecord
from optexport.tracking.finished import Finished
from optexport.tracking.store import made_once

_NUMPY_NAMES = {"bool": "bool_"}


def logged_model(client: Any, run_id: str, finished: Finished) -> str | None:
    """The id of the run's model, which is logged, or completed, where that was not done yet; None without ONNX file.

    One for a card is none: MLflow's models name providers, and not that these are to compute without TF32.
    """
    files = (file for file in finished.manifest.artifacts if (file.format, file.device) == ("onnx", "cpu"))
    path = next((finished.folder / file.path for file in files), None)
    if path is None:
        return None
    import mlflow.onnx
    import onnx
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus
    from mlflow.models import Model

    experiment = client.get_run(run_id).info.experiment_id

    def known() -> Any:
        made = client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
        return made[0] if made else None

    model = known() or made_once(
        lambda: client.create_logged_model(experiment, name="model", source_run_id=run_id), known
    )
    model_id = str(model.model_id)

    def named() -> bool | None:
        outputs = client.get_run(run_id).outputs
        return model_id in [output.model_id for output in (outputs.model_outputs if outputs else ())] or None

    if not named():
        made_once(lambda: client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)]), named)
    if model.status == LoggedModelStatus.READY:
        return model_id
    with tempfile.TemporaryDirectory(prefix="optexport-") as scratch:
        folder = Path(scratch) / "model"
        versions = finished.manifest.versions
        mlflow.onnx.save_model(
            onnx.load(path),
            folder,
            mlflow_model=Model(artifact_path=model.artifact_location, run_id=run_id, model_id=model_id),
            signature=signature(finished.manifest),
            # Named, because finding them out would load the model in a process of its own.
            pip_requirements=[f"{name}=={versions[name]}" for name in ("onnx", "onnxruntime", "mlflow")],
            onnx_execution_providers=["CPUExecutionProvider"],
            metadata={
                "optexport_version": finished.manifest.optexport_version,
                "weights_sha256": finished.manifest.model.weights_sha256,
            },
        )
        client.log_model_artifacts(model_id, str(folder))
    client.finalize_logged_model(model_id, "READY")
    return model_id


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
