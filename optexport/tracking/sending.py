"""Upload of a bundle to an MLflow run. A repeated upload creates no duplicates."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optexport.bundle import digests
from optexport.bundle.layout import SCRIPT, SIGNED
from optexport.errors import BundleError, CheckError
from optexport.tracking import upload_check
from optexport.tracking.bundle_record import BUNDLE, BundleRecord
from optexport.tracking.description import DESCRIPTION_TAG, FAILURE, describe_failure
from optexport.tracking.model import log_model
from optexport.tracking.payload import RunPayload
from optexport.tracking.registry.registration import Registered, register
from optexport.tracking.run_lookup import FOLDER_TAG, folder_id
from optexport.tracking.run_metrics import failure_metrics
from optexport.tracking.tables import TABLES, parity_tables


def send_bundle(client: Any, run_id: str, payload: RunPayload) -> Registered | None:
    """Sends a complete bundle and returns its registration, if the config names a model."""
    from mlflow.entities import Metric, RunTag

    bundle = payload.bundle
    tags = {**bundle.identity, FOLDER_TAG: folder_id(bundle.folder), DESCRIPTION_TAG: payload.description}
    client.log_batch(run_id, tags=[RunTag(key, text) for key, text in tags.items()])
    send_params(client, run_id, payload.params)
    client.log_inputs(run_id, payload.datasets)
    model_id = None if payload.model is None else log_model(client, run_id, payload.model, bundle)
    # MLflow removes duplicate metrics of a run, but not of a logged model.
    recorded = set() if model_id is None else {(m.key, m.step) for m in client.get_logged_model(model_id).metrics or ()}
    client.log_batch(
        run_id,
        metrics=[
            Metric(name, value, bundle.timestamp, step, model_id=model_id)
            for name, value, step in payload.metrics
            if (name, step) not in recorded
        ],
    )
    _send_files(client, run_id, payload.files)
    _send_tables(client, run_id, payload.tables)
    _send_folder(client, run_id, bundle.folder, BUNDLE)
    _check_unchanged(bundle)
    return register_model(client, run_id, payload)


def send_failure(client: Any, run_id: str, error: CheckError, reason: str) -> None:
    """Sends what a failed check has: its metrics, its tables and its folder."""
    from mlflow.entities import Metric

    artifacts: dict[str, str] = {}
    if error.parity is not None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value, step in failure_metrics(error.parity)]
        client.log_batch(run_id, metrics=metrics)
        _send_tables(client, run_id, parity_tables(error.parity))
        artifacts[TABLES] = "the distance of each target and output, and the gates"
    if error.folder is not None:
        _send_folder(client, run_id, error.folder, FAILURE)
        artifacts[FAILURE] = "the tensors of the failed check, and the diagnosis"
        if (error.folder / SCRIPT).is_file():
            artifacts[f"{FAILURE}/{SCRIPT}"] = "a script that reproduces the failure"
    client.set_tag(run_id, DESCRIPTION_TAG, describe_failure(reason, "FAILED", artifacts))


def _send_tables(client: Any, run_id: str, tables: Mapping[str, bytes]) -> None:
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    _send_files(client, run_id, tables, TABLES)
    # MLflow's page finds tables by this tag. `log_table` would append to an existing table.
    listed = [{"path": f"{TABLES}/{name}", "type": "table"} for name in tables]
    client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(listed))


def _send_files(client: Any, run_id: str, files: Mapping[str, bytes], target: str = "") -> None:
    with tempfile.TemporaryDirectory(prefix="optexport-") as location:
        for name, content in files.items():
            (Path(location) / name).write_bytes(content)
        _send_folder(client, run_id, Path(location), target)


def _send_folder(client: Any, run_id: str, folder: Path, target: str) -> None:
    """Sends the files of a folder, and checks that the store has them."""
    client.log_artifacts(run_id, str(folder), target or None)
    upload_check.check_upload(lambda path: client.list_artifacts(run_id, path), folder, target)


def send_signature(client: Any, run_id: str, folder: Path) -> bool:
    """Sends the files of a signature that was made after the upload; returns whether there were any."""
    stored = {file.path for file in client.list_artifacts(run_id, BUNDLE)}
    missing = [name for name in SIGNED if (folder / name).is_file() and f"{BUNDLE}/{name}" not in stored]
    for name in missing:
        client.log_artifact(run_id, str(folder / name), BUNDLE)
    return bool(missing)


def _check_unchanged(bundle: BundleRecord) -> None:
    """Checks that the bundle did not change during the upload, for file systems without locks."""
    digests.read_manifest(bundle.folder)
    if BundleRecord.read(bundle.folder).identity != bundle.identity:
        raise BundleError("the bundle was replaced during the upload", location=str(bundle.folder))


def send_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    """Sends the params that the run does not have.

    Tuning may select other rules after the start of the run, and MLflow does not allow a param to change.
    """
    from mlflow.entities import Param

    recorded = client.get_run(run_id).data.params
    client.log_batch(run_id, params=[Param(name, text) for name, text in params.items() if name not in recorded])


def register_model(client: Any, run_id: str, payload: RunPayload) -> Registered | None:
    """Registers the model of a run with a complete bundle, unless that is already done."""
    settings = payload.bundle.settings.registering
    if settings is None:
        return None
    model_id = None if payload.model is None else log_model(client, run_id, payload.model, payload.bundle)
    return register(client, run_id, str(model_id), payload.bundle, settings)
