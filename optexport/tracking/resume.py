"""Uploads a bundle whose upload failed, to its original MLflow run if that exists."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport._utils import atomic_dir
from optexport.bundle import digests, parts
from optexport.errors import OptexportError, TrackingError
from optexport.tracking import run_params, store
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.payload import build_payload
from optexport.tracking.plausibility import check_possible
from optexport.tracking.registry import Registered
from optexport.tracking.run import REASON_TAG, give_up, new_run, reason_of
from optexport.tracking.run_lookup import run_of
from optexport.tracking.upload import registered, send


@dataclass(frozen=True)
class Logged:
    """The run that holds a bundle.

    Attributes:
        run_id: The id of the run.
        page: The URL of the run. Without a server, the command that starts MLflow's UI comes first.
        before: True if the run was complete already, so that nothing was sent.
        registered: The registration of the model, if the config names one.
    """

    run_id: str
    page: str
    before: bool
    registered: Registered | None


def log_bundle(folder: Path, uri: str, experiment: str | None = None, beside: Path = Path()) -> Logged:
    """Uploads a bundle to MLflow, or completes a partial upload.

    If another process is sending the bundle, this function waits for it. The folder stays locked, so that no run
    replaces it.

    Args:
        uri: The store. The URI in the bundle is ignored: its author may name any server, and a server chooses the path
            of files, even on this machine.
        experiment: The experiment; by default the one in the config.
        beside: The artifact folder of a new experiment, for a database without a server.

    Raises:
        ConfigError: The folder is not a bundle.
        BundleError: The bundle was changed or did not pass its checks.
        TrackingError: The store cannot be reached or rejects the request.
    """
    with atomic_dir.locked(parts.outermost(folder), wait=True):  # two uploads would start two runs
        return log_locked(folder, uri, experiment, beside)


def log_locked(folder: Path, uri: str, experiment: str | None, beside: Path) -> Logged:
    """Does the same as `log_bundle` for a caller that has locked the folder."""
    digests.read_manifest(folder)
    finished = BundleRecord.read(folder)
    check_possible(finished)  # later versions are compared with it
    told = build_payload(finished)
    run_id: str | None = None
    client: Any = None
    try:
        client = store.open_store(uri, beside)
        found = store.experiment_id(client, experiment or finished.asked.tracking.experiment, beside)
        run = run_of(client, found, finished)
        if run is not None and run.info.status == "FINISHED":
            outcome = registered(client, run.info.run_id, told)
            return _logged(client, run.info.run_id, True, outcome)
        if run is None:
            run_id = _started(client, found, finished)
        else:
            run_id = str(run.info.run_id)
            _resume(client, run)
        done = _logged(client, run_id, False, send(client, run_id, told))
        client.set_terminated(run_id)
        return done
    except BaseException as error:  # mlflow, SQLAlchemy and requests each raise their own errors, or a signal arrives
        failed = error
        if isinstance(error, Exception) and (isinstance(error, TrackingError) or not isinstance(error, OptexportError)):
            again = shlex.join(["optexport", "upload", str(finished.folder)])
            hint = f"The bundle is whole on disk. {store.when(error)}, again with the same options: {again}"
            failed = store.failure(error, uri, hint)
        if run_id is not None:
            give_up(client, run_id, reason_of(failed))
        if isinstance(error, KeyboardInterrupt):
            error.add_note("The bundle is whole on disk. What was not sent is sent by the same call, again.")
        if failed is error:
            raise
        raise failed from error


def _started(client: Any, experiment: str, finished: BundleRecord) -> str:
    manifest = finished.manifest
    origin = run_params.tags(manifest.model.source, manifest.versions, finished.measured.origin)
    # The run gets its tags at once, so that a later call can find it.
    return new_run(client, experiment, Path(finished.asked.export.output).name, {**origin, **finished.identity})


def _resume(client: Any, run: Any) -> None:
    client.update_run(run.info.run_id, "RUNNING")
    if REASON_TAG in run.data.tags:
        client.delete_tag(run.info.run_id, REASON_TAG)


def _logged(client: Any, run_id: str, before: bool, outcome: Registered | None) -> Logged:
    experiment = client.get_run(run_id).info.experiment_id
    return Logged(run_id, store.page(client.tracking_uri, experiment, run_id), before, outcome)
