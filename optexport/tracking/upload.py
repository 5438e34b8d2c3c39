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
from optexport.tracking.model import logged_model
from optexport.tracking.payload import RunPayload
from optexport.tracking.registry.registration import Registered, register
from optexport.tracking.run_lookup import FOLDER_TAG, folder_of


def send(client: Any, run_id: str, told: RunPayload) -> Registered | None:
    """Sends a complete bundle and returns its registration, if the config names a model."""
    from mlflow.entities import Metric, RunTag
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    finished = told.finished
    tags = {**finished.identity, FOLDER_TAG: folder_of(finished.folder)}
    client.log_batch(run_id, tags=[RunTag(key, text) for key, text in tags.items()])
    send_params(client, run_id, told.params)
    client.log_inputs(run_id, told.datasets)
    model_id = None if told.model is None else logged_model(client, run_id, told.model, finished)
    # MLflow removes duplicate metrics of a run, but not of a logged model.
    known = set() if model_id is None else {(m.key, m.step) for m in client.get_logged_model(model_id).metrics or ()}
    client.log_batch(
        run_id,
        metrics=[
            Metric(name, value, finished.timestamp, step, model_id=model_id)
            for name, value, step in told.metrics
            if (name, step) not in known
        ],
    )
    with tempfile.TemporaryDirectory(prefix="optexport-") as location:
        shown = Path(location)
        for name, content in (*told.tables.items(), *told.others.items()):
            (shown / name).write_bytes(content)
        client.log_artifacts(run_id, location)
        # MLflow's page finds tables by this tag. `log_table` would append to an existing table.
        listed = [{"path": name, "type": "table"} for name in told.tables]
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(listed))
        client.log_artifacts(run_id, str(finished.folder), BUNDLE)
        for sent, where in ((shown, ""), (finished.folder, BUNDLE)):
            upload_check.check(lambda path: client.list_artifacts(run_id, path), sent, where)
    _check_unchanged(finished)
    return registered(client, run_id, told)


def _check_unchanged(finished: BundleRecord) -> None:
    """Checks that the bundle did not change during the upload, for file systems without locks."""
    digests.read_manifest(finished.folder)
    if BundleRecord.read(finished.folder).identity != finished.identity:
        raise BundleError("another one took its place while it was sent", location=str(finished.folder))


def send_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    """Sends the params that the run does not have.

    Tuning may select other rules after the start of the run, and MLflow does not allow a param to change.
    """
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    client.log_batch(run_id, params=[Param(name, text) for name, text in params.items() if name not in known])


def registered(client: Any, run_id: str, told: RunPayload) -> Registered | None:
    """Registers the model of a run with a complete bundle, unless that is already done."""
    asked = told.finished.asked.registering
    if asked is None:
        return None
    model_id = None if told.model is None else logged_model(client, run_id, told.model, told.finished)
    return register(client, run_id, str(model_id), told.finished, asked)
