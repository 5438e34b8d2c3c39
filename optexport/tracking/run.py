"""An MLflow run that covers the whole work and records its result.

A failure of the tracking server must not lose the work. It is stored, the work continues, and the error is raised at
the end.
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import os
import shlex
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optexport._utils import atomic_dir
from optexport.bundle import parts
from optexport.config.schema import TrackingConfig
from optexport.errors import (
    BundleError,
    CheckError,
    ConfigError,
    ModelError,
    OptexportError,
    SourceError,
    TrackingError,
)
from optexport.redaction import redact, redact_error
from optexport.tracking import run_params, store
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.description import DESCRIPTION_TAG, describe_failure
from optexport.tracking.payload import build_payload
from optexport.tracking.registry.registration import Registered
from optexport.tracking.run_lookup import FOLDER_TAG, START_TAG, find_run, folder_id
from optexport.tracking.sending import send_bundle, send_failure, send_params

REASON_TAG = "optexport.failure"
# Environment variable with the id of the parent run, for example of a batch.
PARENT_VARIABLE = "OPTEXPORT_PARENT_RUN"
# Environment variable with the attempt of a batch. If its process dies, the batch finds the runs by this value.
ATTEMPT_VARIABLE = "OPTEXPORT_ATTEMPT"
ATTEMPT_TAG = "optexport.attempt"
# Environment variable that turns tracking off, because another process uploads the bundle.
LATER_VARIABLE = "OPTEXPORT_LOG_LATER"


def is_tracked(config: TrackingConfig) -> bool:
    """Returns True if the run of this process is tracked, and not left to another process."""
    return config.enabled and not os.environ.get(LATER_VARIABLE)


class Tracker:
    """One MLflow run.

    Attributes:
        run_id: The id of the run; None if it could not be started or tracking is off.
        page: The URL of the run. Without a server, the command that starts MLflow's UI comes first.
        failure: The first error of the store, or None.
        registered: The registration of the model; None if the config does not register it.

    Args:
        path: The path of the config, or None. A relative path in the tracking URI starts at its folder, or at the
            working directory.
        bundle: The output folder.
    """

    def __init__(self, config: TrackingConfig, path: Path | None, bundle: Path) -> None:
        self.run_id: str | None = None
        self.page: str | None = None
        self.failure: TrackingError | None = None
        self.registered: Registered | None = None
        self._config = config
        self._path = path
        self._bundle = bundle

    def start(self, settings: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Starts the run and sends its params and tags.

        Args:
            settings: The nested settings of the run.
        """

        def action() -> None:
            folder = Path.cwd() if self._path is None else self._path.parent
            self._client = store.open_store(self._config.store, folder)
            experiment = store.experiment_id(self._client, self._config.experiment, folder)
            names = [self._bundle.parent.name] if "part" in tags else []
            self.run_id = new_run(self._client, experiment, " ".join([*names, self._bundle.name]), tags)
            self.page = store.page(self._client.tracking_uri, experiment, self.run_id)
            send_params(self._client, self.run_id, run_params.params(settings))
            end_unfinished_run(self._client, experiment, self._bundle)

        self._guarded(action)

    def send(self) -> None:
        """Sends the bundle, which must be complete and locked against other processes."""

        def action() -> None:
            bundle = BundleRecord.read(self._bundle)
            if bundle.measurements.origin.mlflow_run not in (None, self.run_id):  # if a file system has no locks
                raise BundleError("another run has replaced the bundle of this run", location=str(self._bundle))
            with self._upload_note():
                self.registered = send_bundle(self._client, str(self.run_id), build_payload(bundle))

        self._guarded(action)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the run: as KILLED after an interrupt, as FAILED after another error, otherwise as FINISHED.

        A failed check also sends its tables and its folder. A mistake in the config or the source deletes the run;
        most are found before it starts.

        Args:
            error: The error that ended the work; None if the work succeeded. The run then ends as FAILED only if the
                store failed.
        """

        def action() -> None:
            with self._upload_note():
                self._client.set_terminated(self.run_id)

        if error is None and self.run_id is not None:
            self._guarded(action)
        error = self.failure if error is None else error
        if error is None or self.run_id is None:
            return
        end_failed(self._client, self.run_id, reason_of(error), status_of(error))
        if isinstance(error, ConfigError | SourceError | ModelError):
            with contextlib.suppress(Exception), store.short_timeout():
                self._client.delete_run(self.run_id)
        elif isinstance(error, OptexportError):
            error.run_id = self.run_id
        if isinstance(error, CheckError) and self.failure is None:
            self._send_failure(error)

    def _send_failure(self, error: CheckError) -> None:
        try:
            send_failure(self._client, str(self.run_id), error, redact_error(reason_of(error)))
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(str(error))  # otherwise the user never reads why the check failed
            raise
        except Exception as problem:  # mlflow, SQLAlchemy, requests and the file system each raise their own errors
            cause = store.failure(problem, self._config.store, "")
            error.add_detail(f"The MLflow run lacks files of this failure: {cause.message}")

    def _guarded(self, action: Callable[[], object]) -> None:
        if not is_tracked(self._config) or self.failure is not None:
            return
        try:
            action()
        except Exception as error:  # mlflow, SQLAlchemy, requests and the file system each raise their own errors
            hint = f"The bundle on disk is complete. {store.retry_condition(error)}, run: {self._upload_command()}"
            self.failure = store.failure(error, self._config.store, hint)

    @contextlib.contextmanager
    def _upload_note(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"The bundle on disk is complete. To upload it, run: {self._upload_command()}")
            raise

    def _upload_command(self) -> str:
        has_config = self._path is not None and self._path.exists()
        where = ["--config", str(self._path)] if has_config else ["--uri", redact(self._config.store)]
        return shlex.join(["optexport", "upload", str(self._bundle), *where])


def new_run(
    client: Any, experiment: str, name: str, tags: Mapping[str, str], date: datetime.datetime | None = None
) -> str:
    """Starts a run and returns its id.

    mlflow's fluent API is not used: it would tag the run with the commit of this program, not of the config.

    Args:
        name: The name of the run, without the date that makes it differ from other runs of the same config.
        date: The local time of the work; by default the current time.
    """
    name = f"{name} {date or datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    user = {}
    with contextlib.suppress(OSError, KeyError):  # user ids in containers may have no name
        user["mlflow.user"] = getpass.getuser()
    parent = os.environ.get(PARENT_VARIABLE)
    nested = {"mlflow.parentRunId": parent} if parent else {}
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    attempt_tag = {ATTEMPT_TAG: attempt} if attempt else {}
    start = uuid.uuid4().hex
    all_tags = {"mlflow.runName": name, START_TAG: start, **user, **nested, **attempt_tag, **tags}

    def find_started() -> Any:
        runs = client.search_runs([experiment], f"tags.`{START_TAG}` = '{start}'")
        return runs[0] if runs else None

    try:
        run = store.create_once(lambda: client.create_run(experiment, tags=all_tags), find_started)
    # The server may have created the run; look for it, because its id is unknown here.
    except KeyboardInterrupt as interrupt:
        with contextlib.suppress(Exception), store.short_timeout():
            if (run := find_started()) is not None:
                end_failed(client, run.info.run_id, reason_of(interrupt), status_of(interrupt))
        raise
    if not run.info.run_id:  # an empty id would pass as a run
        raise ConnectionError("the server is not an MLflow server: it created a run without an id")
    return str(run.info.run_id)


def reason_of(error: BaseException) -> str:
    """Returns the failure reason of a run."""
    return "interrupted" if _is_interrupt(error) else str(error) or type(error).__name__


def status_of(error: BaseException) -> str:
    """Returns the MLflow status of a run that an error ended."""
    return "KILLED" if _is_interrupt(error) else "FAILED"


def _is_interrupt(error: BaseException) -> bool:
    """Returns True for Ctrl-C and other signals, also if a signal ended Python with the exit code 128 + its number."""
    if isinstance(error, SystemExit):
        return isinstance(error.code, int) and error.code - 128 in set(signal.Signals)
    return isinstance(error, KeyboardInterrupt)


def end_failed(client: Any, run_id: str, reason: str, status: str = "FAILED") -> None:
    """Ends a run as FAILED or KILLED. Errors of the store are ignored in favor of the original failure."""
    with contextlib.suppress(Exception), store.short_timeout():
        client.set_terminated(run_id, status)
        client.set_tag(run_id, REASON_TAG, redact_error(reason)[:5000])
        client.set_tag(run_id, DESCRIPTION_TAG, describe_failure(redact_error(reason), status))


def end_unfinished_run(client: Any, experiment: str, bundle: Path) -> None:
    """Ends a RUNNING run of the previous bundle as FAILED.

    Its upload failed, or its process was killed. `optexport upload` can still complete it while the bundle exists.

    A process that sends a bundle locks its folder. A tag of the run identifies that folder, because a copy may be sent
    from elsewhere. Errors are ignored, because they must not fail the next run.
    """
    with (
        contextlib.suppress(Exception),
        store.short_timeout(),
        atomic_dir.locked(parts.outermost(bundle), wait=False) as is_locked,
        # A second lock succeeds only on a file system without locks. Then another process may be sending the bundle.
        atomic_dir.locked(parts.outermost(bundle), wait=False) as is_locked_twice,
    ):
        if not is_locked or is_locked_twice:
            return
        run, location = find_run(client, experiment, BundleRecord.read(bundle)), folder_id(bundle)
        if run is not None and run.info.status == "RUNNING" and run.data.tags.get(FOLDER_TAG, location) == location:
            end_failed(client, run.info.run_id, "the upload was incomplete when another run to the same output started")


@contextlib.contextmanager
def tracking(tracker: Tracker, settings: Mapping[str, Any], tags: Mapping[str, str]) -> Iterator[None]:
    """Starts a run, and ends it as FINISHED, FAILED or KILLED when the block ends.

    Tracking errors are stored in `Tracker.failure` and not raised, because the work itself may have succeeded.

    Args:
        settings: The resolved config, for the run's params.
    """
    try:
        tracker.start(settings, tags)
        yield
        tracker.end()
    except BaseException as error:
        tracker.end(error)
        raise
