"""Uploads a bundle, for `optexport upload`: to the MLflow run of its export if that exists, or to a new one."""

from __future__ import annotations

import datetime
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport._utils import atomic_dir
from optexport._utils.paths import as_path
from optexport.bundle import digests, parts
from optexport.bundle.sign import check_signature
from optexport.config import tracking_uri
from optexport.errors import ConfigError, OptexportError, TrackingError
from optexport.tracking import run_params, store
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.payload import build_payload
from optexport.tracking.plausibility import check_plausible
from optexport.tracking.registry.registration import Registered
from optexport.tracking.run import REASON_TAG, end_failed, new_run, reason_of, status_of
from optexport.tracking.run_lookup import find_run
from optexport.tracking.sending import register_model, send_bundle, send_signature


@dataclass(frozen=True)
class Uploaded:
    """The run that holds a bundle.

    Attributes:
        run_id: The id of the run.
        page: The URL of the run. Without a server, the command that starts MLflow's UI comes first.
        already_uploaded: True if the run was complete already, so that nothing was sent.
        registered: The registration of the model, if the config names one; its ``failure`` is an error or None.
    """

    run_id: str
    page: str
    already_uploaded: bool
    registered: Registered | None


def upload(
    bundle: str | os.PathLike[str],
    uri: str | None = None,
    *,
    experiment: str | None = None,
    key: str | os.PathLike[str] | None = None,
) -> Uploaded:
    """Uploads a bundle to MLflow unless it was uploaded before, like ``optexport upload``.

    Args:
        bundle: The folder.
        uri: The MLflow store; by default that of ``MLFLOW_TRACKING_URI``.
        experiment: The experiment; by default the one in the bundle's config.
        key: A public key; the bundle must then have a valid signature.

    Returns:
        The MLflow run: its ``run_id``, its ``page``, ``before`` (True if the run was complete already, so that nothing
        was sent), and ``registered``, the registration of the model, or None if the config registers none.
        ``registered.failure`` is an error if the alias stays at another version.

    Raises:
        ConfigError: The folder is not a bundle, the URI is invalid, or nothing sets one.
        BundleError: The bundle was changed or did not pass its checks.
        TrackingError: The store cannot be reached or rejects the request.
    """
    store_uri = tracking_uri.find_uri(uri, "uri", "Pass uri=..., or set MLFLOW_TRACKING_URI.")
    if experiment is not None and not (isinstance(experiment, str) and experiment):
        raise ConfigError(f"{experiment!r} is not the name of an experiment", location="experiment")
    folder = as_path(bundle, "bundle")
    check_signature(folder, key)
    return upload_bundle(folder, store_uri, experiment)


def upload_bundle(folder: Path, uri: str, experiment: str | None = None, location: Path = Path()) -> Uploaded:
    """Uploads a bundle to MLflow, or completes a partial upload.

    If another process is sending the bundle, this function waits for it. The folder stays locked, so that no run
    replaces it.

    Args:
        uri: The store. The URI in the bundle is ignored: its author may name any server, and a server chooses the path
            of files, even on this machine.
        experiment: The experiment; by default the one in the config.
        location: Parent of a new experiment's artifact folder and start of a relative path in the URI, for a database
            without a server.

    Raises:
        ConfigError: The folder is not a bundle.
        BundleError: The bundle was changed or did not pass its checks.
        TrackingError: The store cannot be reached or rejects the request.
    """
    with atomic_dir.locked(parts.outermost(folder), wait=True):  # two uploads would start two runs
        return upload_locked(folder, uri, experiment, location)


def upload_locked(folder: Path, uri: str, experiment: str | None, location: Path) -> Uploaded:
    """Does the same as `upload_bundle` for a caller that has locked the folder."""
    digests.read_manifest(folder)
    bundle = BundleRecord.read(folder)
    check_plausible(bundle)  # later versions are compared with it
    payload = build_payload(bundle)
    run_id: str | None = None
    client: Any = None
    try:
        client = store.open_store(uri, location)
        experiment_id = store.experiment_id(client, experiment or bundle.settings.tracking.experiment, location)
        run = find_run(client, experiment_id, bundle)
        if run is not None and run.info.status == "FINISHED":
            is_signed_later = send_signature(client, run.info.run_id, folder)
            registered = register_model(client, run.info.run_id, payload)
            return _uploaded(client, run.info.run_id, not is_signed_later, registered)
        if run is None:
            run_id = _start(client, experiment_id, bundle)
        else:
            run_id = str(run.info.run_id)
            _resume(client, run)
        uploaded = _uploaded(client, run_id, False, send_bundle(client, run_id, payload))
        client.set_terminated(run_id)
        return uploaded
    except BaseException as error:  # mlflow, SQLAlchemy and requests each raise their own errors, or a signal arrives
        failure = error
        if isinstance(error, Exception) and (isinstance(error, TrackingError) or not isinstance(error, OptexportError)):
            command = shlex.join(["optexport", "upload", str(bundle.folder)])
            hint = (
                f"The bundle on disk is complete. {store.retry_condition(error)}, run with the same options: {command}"
            )
            failure = store.failure(error, uri, hint)
        if run_id is not None:
            end_failed(client, run_id, reason_of(failure), status_of(failure))
        if isinstance(error, KeyboardInterrupt):
            error.add_note("The bundle on disk is complete. Run the same command again to complete the upload.")
        if failure is error:
            raise
        raise failure from error


def _start(client: Any, experiment: str, bundle: BundleRecord) -> str:
    manifest = bundle.manifest
    formats = [artifact.format for artifact in manifest.artifacts]
    origin = bundle.measurements.origin
    tags = run_params.tags(manifest.model.source, formats, manifest.versions, origin)
    name = " ".join(part for part in (Path(bundle.settings.export.output).name, origin.part) if part)
    date = datetime.datetime.fromtimestamp(bundle.timestamp / 1000)
    # The run gets its tags at once, so that a later call can find it.
    return new_run(client, experiment, name, {**tags, **bundle.identity}, date)


def _resume(client: Any, run: Any) -> None:
    client.update_run(run.info.run_id, "RUNNING")
    if REASON_TAG in run.data.tags:
        client.delete_tag(run.info.run_id, REASON_TAG)


def _uploaded(client: Any, run_id: str, already_uploaded: bool, registered: Registered | None) -> Uploaded:
    experiment = client.get_run(run_id).info.experiment_id
    return Uploaded(run_id, store.page(client.tracking_uri, experiment, run_id), already_uploaded, registered)
