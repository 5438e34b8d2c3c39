"""Sends a bundle to a run: all that MLflow is told of it. What was sent before may be sent again, and is there once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optexport.bundle.places import REPORT
from optexport.tracking import facts
from optexport.tracking.datasets import datasets
from optexport.tracking.figures import figures
from optexport.tracking.finished import Finished
from optexport.tracking.model import logged_model
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
    shown = tables(finished)
    for name, table in shown.items():
        client.log_dict(run_id, dict(table), name)
    # By this tag MLflow's page finds what it shows as tables; its log_table would append to one that is there.
    client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([{"path": name, "type": "table"} for name in shown]))
    for name, figure in figures(finished).items():
        client.log_figure(run_id, figure, name)
    if (folder / "config.toml").is_file():
        client.log_artifact(run_id, str(folder / "config.toml"))
    client.log_artifacts(run_id, str(folder), "bundle")
    if (folder / REPORT).is_file():
        client.log_artifact(run_id, str(folder / REPORT))  # once more, where it is seen at once
    return registered(client, run_id, finished)


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
