"""The MLflow run of a bundle, and the folder that the bundle is sent from."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from optexport.tracking.bundle_record import RUN_TAG, BundleRecord

# Tag with a unique value per call, to find a run whose creation was not answered.
START_TAG = "optexport.start"
# Tag with the folder that the bundle was last sent from. The folder is locked during an upload.
FOLDER_TAG = "optexport.folder"


def find_run(client: Any, experiment: str, bundle: BundleRecord) -> Any:
    """Returns the run that was started for a bundle or received it before, or None.

    The author of a bundle may name any run. A run of another bundle or another program is ignored.
    """
    from mlflow.exceptions import MlflowException

    if (run_id := bundle.measurements.origin.mlflow_run) is not None:
        try:
            run = client.get_run(run_id)
        except MlflowException as error:  # the run belongs to another store
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            digest = run.data.tags.get(RUN_TAG)
            is_incomplete = digest is None and START_TAG in run.data.tags and run.info.status != "FINISHED"
            if run.info.lifecycle_stage == "active" and (is_incomplete or digest == bundle.identity[RUN_TAG]):
                return run
    runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{bundle.identity[RUN_TAG]}'")
    # There are two if an answer was lost and the run was started again.
    return next((run for run in runs if run.info.status == "FINISHED"), runs[0] if runs else None)


def folder_id(bundle: Path) -> str:
    """Returns an identifier that differs between a folder and its copies."""
    status = bundle.stat()
    return f"{platform.node()}:{status.st_dev}:{status.st_ino}"
