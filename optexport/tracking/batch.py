"""The parent MLflow run of a batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optexport.config.schema import TrackingConfig
from optexport.errors import TrackingError
from optexport.redaction import redact_error
from optexport.tracking import store
from optexport.tracking.description import DESCRIPTION_TAG, describe_failure
from optexport.tracking.run import ATTEMPT_TAG, PARENT_VARIABLE, REASON_TAG, end_failed, new_run, reason_of, status_of


class BatchRun:
    """An MLflow run that is the parent of other runs.

    Attributes:
        run_id: The id of the run; None if it could not be started.
        page: The URL of the run, after the command that serves it if necessary.
        failure: The error that prevented the start or the upload of some data.
        table: The columns of the results table, by name.
        metrics: The metrics of the batch, by name.
        reason: The reason for the status FAILED; None for FINISHED.
    """

    def __init__(self) -> None:
        self.run_id: str | None = None
        self.page: str | None = None
        self.failure: TrackingError | None = None
        self.table: Mapping[str, Sequence[Any]] = {}
        self.metrics: Mapping[str, float] = {}
        self.reason: str | None = None


@contextlib.contextmanager
def batch_run(config: TrackingConfig, path: Path, size: int) -> Iterator[BatchRun]:
    """Starts the parent run of a batch and sends its results when the block ends.

    Runs of processes that start within the block are nested under it.

    Args:
        config: The store and the experiment.
        path: The path of the config. A relative path in the tracking URI starts at its folder.
        size: The number of configs in the batch.
    """
    run = BatchRun()
    client: Any = None
    try:
        try:
            client = store.open_store(config.store, path.parent)
            experiment = store.experiment_id(client, config.experiment, path.parent)
            run.run_id = new_run(client, experiment, "batch", {})
            run.page = store.page(client.tracking_uri, experiment, run.run_id)
            client.log_param(run.run_id, "configs", size)
        except Exception as error:  # mlflow, SQLAlchemy, requests and the file system each raise their own errors
            run.failure = store.failure(error, config.store, "The runs of the bundles are tracked anyway.")
        if run.run_id is not None:
            os.environ[PARENT_VARIABLE] = run.run_id
        yield run
        if run.run_id is not None:
            _send_results(client, run.run_id, run, config)
    except BaseException as error:
        if run.run_id is not None:
            end_failed(client, run.run_id, reason_of(error), status_of(error))
        raise
    finally:
        os.environ.pop(PARENT_VARIABLE, None)


def _send_results(client: Any, run_id: str, run: BatchRun, config: TrackingConfig) -> None:
    """Sends the results of a batch, and ends its run."""
    try:
        for name, value in run.metrics.items():
            client.log_metric(run_id, name, value)
        client.log_table(run_id, {name: list(column) for name, column in run.table.items()}, "batch.json")
        if run.reason is None:
            client.set_terminated(run_id)
        else:
            end_failed(client, run_id, run.reason)
    except Exception as error:
        failure = store.failure(error, config.store, "The runs of the bundles are complete.")
        run.failure = run.failure or failure
        end_failed(client, run_id, failure.message)


def end_lost_runs(config: TrackingConfig, path: Path, attempt: str, reason: str, status: str) -> list[str]:
    """Ends the runs of an attempt whose process was lost, and returns their ids.

    Args:
        path: The path of the config. A relative path in the tracking URI starts at its folder.
        attempt: The value of the attempt tag of these runs.
        status: ``KILLED`` or ``FAILED``.

    Raises:
        TrackingError: The store cannot be reached.
    """
    try:
        client = store.open_store(config.store, path.parent)
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is None:
            return []
        query = f"attributes.status = 'RUNNING' and tags.`{ATTEMPT_TAG}` = '{attempt}'"
        run_ids = [str(run.info.run_id) for run in client.search_runs([experiment.experiment_id], query)]
        for run_id in run_ids:
            client.set_terminated(run_id, status)
            client.set_tag(run_id, REASON_TAG, redact_error(reason))
            client.set_tag(run_id, DESCRIPTION_TAG, describe_failure(redact_error(reason), status))
        return run_ids
    except Exception as error:
        raise store.failure(error, config.store, "The MLflow run of the attempt may stay RUNNING.") from error
