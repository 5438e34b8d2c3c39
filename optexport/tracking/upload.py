"""Upload of a bundle to an MLflow run. A repeated upload creates no duplicates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optexport.bundle import digests
from optexport.errors import BundleError
from optexport.tracking import upload_check
from optexport.tracking.bundle_record import BUNDLE, BundleRecord
from optexport.tracking.model import log_model
from optexport.tracking.payload import RunPayload
from optexport.tracking.registry.registration import Registered, register
from optexport.tracking.run_lookup import FOLDER_TAG, folder_id


def send_bundle(client: Any, run_id: str, payload: RunPayload) -> Registered | None:
    """Sends a complete bundle and returns its registration, if the config names a model."""
    from mlflow.entities import Metric, RunTag
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    bundle = payload.bundle
    tags = {**bundle.identity, FOLDER_TAG: folder_id(bundle.folder)}
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
    with tempfile.TemporaryDirectory(prefix="optexport-") as location:
        page_files = Path(location)
        for name, content in (*payload.tables.items(), *payload.files.items()):
            (page_files / name).write_bytes(content)
        client.log_artifacts(run_id, location)
        # MLflow's page finds tables by this tag. `log_table` would append to an existing table.
        listed = [{"path": name, "type": "table"} for name in payload.tables]
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(listed))
        client.log_artifacts(run_id, str(bundle.folder), BUNDLE)
        for folder, target in ((page_files, ""), (bundle.folder, BUNDLE)):
            upload_check.check_upload(lambda path: client.list_artifacts(run_id, path), folder, target)
    _check_unchanged(bundle)
    return register_model(client, run_id, payload)


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
