"""Sends a bundle to a run: all that MLflow is told of it. What was sent before may be sent again, and is there once."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optexport.bundle import digests
from optexport.bundle.places import REPORT
from optexport.errors import BundleError, first_line
from optexport.tracking import arrived, facts
from optexport.tracking.datasets import datasets
from optexport.tracking.figures import figures
from optexport.tracking.finished import BUNDLE, Finished
from optexport.tracking.model import check_model, logged_model
from optexport.tracking.registry import Registered, register
from optexport.tracking.tables import tables


def send(client: Any, run_id: str, finished: Finished) -> Registered | None:
    """Sends a whole bundle; says what became of it in the registry, if the config names one."""
    from mlflow.entities import Metric, RunTag
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    manifest, folder = finished.manifest, finished.folder
    client.log_batch(run_id, tags=[RunTag(key, text) for key, text in finished.identity.items()])
    send_params(client, run_id, manifest.config)
    client.log_inputs(run_id, datasets(finished))
    model_id = logged_model(client, run_id, finished)
    # MLflow knows a metric of a run that comes twice, and not one of a model.
    known = set() if model_id is None else {(m.key, m.step) for m in client.get_logged_model(model_id).metrics or ()}
    numbers = [(name, value, 0) for name, value in facts.metrics(finished).items()]
    client.log_batch(
        run_id,
        metrics=[
            Metric(name, value, finished.timestamp, step, model_id=model_id)
            for name, value, step in [*numbers, *facts.steps(manifest)]
            if (name, step) not in known
        ],
    )
    with tempfile.TemporaryDirectory(prefix="optexport-") as place:
        shown = Path(place)
        names = _write_shown(shown, finished)
        client.log_artifacts(run_id, place)
        # By this tag MLflow's page finds what it shows as tables; its log_table would append to one that is there.
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([{"path": n, "type": "table"} for n in names]))
        client.log_artifacts(run_id, str(folder), BUNDLE)
        for sent, where in ((shown, ""), (folder, BUNDLE)):
            arrived.check(lambda path: client.list_artifacts(run_id, path), sent, where)
    _check_unchanged(finished)
    return registered(client, run_id, finished)


def check_tellable(finished: Finished) -> None:
    """Checks that all can be made that MLflow is to be told of a bundle, before anything is sent.

    Raises:
        BundleError: It cannot: the bundle is at fault, and no store that will answer later.
    """
    try:
        facts.metrics(finished)
        facts.steps(finished.manifest)
        tables(finished)
        datasets(finished)
        check_model(finished)
    except BundleError:
        raise
    except Exception as error:  # documents that were sealed by others may hold anything that their form allows
        told = f"{type(error).__name__}: {first_line(error)}"
        raise BundleError(f"MLflow cannot be told of it: {told}", place=str(finished.folder)) from error


def _write_shown(folder: Path, finished: Finished) -> list[str]:
    """Writes what is seen at once on the page of a run, outside of its bundle; gives the names of the tables."""
    shown = tables(finished)
    for name, table in shown.items():
        (folder / name).write_text(json.dumps(dict(table), indent=2, default=str), encoding="utf-8")
    for name, figure in figures(finished).items():
        figure.savefig(folder / name)
    for name in ("config.toml", REPORT):
        if (finished.folder / name).is_file():
            shutil.copyfile(finished.folder / name, folder / name)
    return list(shown)


def _check_unchanged(finished: Finished) -> None:
    """Checks that what was sent file by file is the bundle that was read before, where file systems know no locks too.

    Raises:
        BundleError: It was changed, or another one has taken its place.
    """
    digests.read_manifest(finished.folder)
    if Finished.read(finished.folder).identity != finished.identity:
        raise BundleError("another one took its place while it was sent", place=str(finished.folder))


def send_params(client: Any, run_id: str, settings: Mapping[str, Any]) -> None:
    """Sends nested settings as params, but for those that the run has.

    Tuning may have settled on other rules than the run started with, and MLflow lets no param change.
    """
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    client.log_batch(run_id, params=[Param(k, text) for k, text in facts.params(settings).items() if k not in known])


def registered(client: Any, run_id: str, finished: Finished) -> Registered | None:
    """Registers the model of a run that holds the whole bundle, unless that was done before."""
    asked = finished.asked.registering
    if asked is None:
        return None
    model_id = logged_model(client, run_id, finished)
    return register(client, run_id, str(model_id), finished, asked)
