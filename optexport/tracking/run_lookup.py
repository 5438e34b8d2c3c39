"""The run that a bundle was sent to, or is to be, and from which folder."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from optexport.tracking.bundle_record import RUN_TAG, BundleRecord

# Another one for each call that starts a run, by which it is found where the answer was lost.
START_TAG = "optexport.start"
# Of a run: the folder that a bundle was last sent from, which is locked as long as it is sent.
FOLDER_TAG = "optexport.folder"


def run_of(client: Any, experiment: str, finished: BundleRecord) -> Any:
    """The run that was started for the bundle, or that it was sent to before; None where there is none.

    Whoever writes a bundle may name any run in it: one that holds another bundle, or none of ours, is not believed.
    """
    from mlflow.exceptions import MlflowException

    if (known := finished.measured.origin.mlflow_run) is not None:
        try:
            run = client.get_run(known)
        except MlflowException as error:  # it is that of another store
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            held = run.data.tags.get(RUN_TAG)
            waits = held is None and START_TAG in run.data.tags and run.info.status != "FINISHED"
            if run.info.lifecycle_stage == "active" and (waits or held == finished.identity[RUN_TAG]):
                return run
    found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{finished.identity[RUN_TAG]}'")
    # Two where an answer was lost on the way, and the run was started again.
    return next((run for run in found if run.info.status == "FINISHED"), found[0] if found else None)


def folder_of(bundle: Path) -> str:
    """What tells a folder from its copies, here and elsewhere."""
    lies = bundle.stat()
    return f"{platform.node()}:{lies.st_dev}:{lies.st_ino}"
