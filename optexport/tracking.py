"""MLflow: one run that starts before the work, and ends with whatever came of it. The only file that imports mlflow.

Losing the tracking server must not lose the work: what fails here is remembered, the work goes on, and the failure is
raised when everything else is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optexport.config import TrackingConfig
from optexport.errors import SourceError, TrackingError, first_line, redact
from optexport.manifest import Manifest, TensorRecord
from optexport.places import REPORT

_LONGEST_PARAM = 500
_NUMPY_NAMES = {"bool": "bool_"}


class Tracker:
    """One MLflow run.

    Attributes:
        run_id: Its id; None where it could not be started, or tracking is off.
        page: The address of the run in MLflow's own page, after the command that serves it where no server does.
        failure: The first thing that failed; None while all is well.
    """

    def __init__(self, uri: str | None, experiment: str, folder: Path) -> None:
        self.run_id: str | None = None
        self.page: str | None = None
        self.failure: TrackingError | None = None
        self._uri = uri
        if uri is not None:
            self._guarded(lambda: self._start(uri, experiment, folder))

    def params(self, values: Mapping[str, Any]) -> None:
        """Logs nested settings as flat params; long ones are cut, the whole config being an artifact anyway."""
        self._guarded(lambda: self._mlflow.log_params(_flat(values)))

    def tags(self, values: Mapping[str, str | None]) -> None:
        """Logs tags; those without a value are left out."""
        self._guarded(lambda: self._mlflow.set_tags({key: value for key, value in values.items() if value}))

    def result(
        self,
        manifest: Manifest,
        seconds: Mapping[str, float],
        folder: Path,
        config_text: str | None,
        bench: Mapping[str, float] | None = None,
    ) -> None:
        """Logs metrics, node lists, the bundle, and the ONNX file as a model to load by name.

        Args:
            bench: What was measured of the files; names may hold any characters.
        """
        self._guarded(lambda: self._mlflow.log_metrics({_key(key): value for key, value in (bench or {}).items()}))
        self._guarded(lambda: self._result(manifest, seconds, folder, config_text))

    def end(self, reason: str | None = None) -> None:
        """Ends the run: as FINISHED, or as FAILED for a reason, which may be that something could not be tracked."""
        if reason is None:
            self._guarded(lambda: self._mlflow.end_run())
        failed = reason or (str(self.failure) if self.failure is not None else None)
        if failed is not None and self.run_id is not None:
            with contextlib.suppress(Exception):  # what is already known to have failed is the failure that counts
                self._mlflow.end_run("FAILED")
                self._mlflow.MlflowClient().set_tag(self.run_id, "optexport.blame.failure", redact(failed)[:5000])

    def _guarded(self, action: Callable[[], object]) -> None:
        if self._uri is None or self.failure is not None:
            return
        try:
            action()
        except Exception as error:  # mlflow, SQLAlchemy, requests and the file system each raise their own
            self.failure = TrackingError(
                f"{type(error).__name__}: {first_line(error)}",
                place=f"tracking.uri: {self._uri}",
                mend="The bundle is whole on disk. Mend the server or the URI and run again to track it.",
            )
            self.failure.__cause__ = error

    def _start(self, uri: str, experiment: str, folder: Path) -> None:
        self._mlflow = _import_mlflow()
        uri = resolved_uri(uri, folder)
        _check_writable(uri)
        self._mlflow.set_tracking_uri(uri)
        if self._mlflow.get_experiment_by_name(experiment) is None:
            # An embedded database has no server to say where files go: beside it, not wherever the program is called.
            beside = (folder / "mlartifacts").resolve().as_uri() if uri.startswith("sqlite:") else None
            self._mlflow.create_experiment(experiment, artifact_location=beside)
        self._mlflow.set_experiment(experiment)
        run = self._mlflow.start_run()
        self.run_id = run.info.run_id
        self.page = _page(uri, run.info.experiment_id, run.info.run_id)

    def _result(self, manifest: Manifest, seconds: Mapping[str, float], folder: Path, config_text: str | None) -> None:
        mlflow = self._mlflow
        mlflow.log_metrics(_metrics(manifest, seconds))
        rows = [
            {
                "rule": t.rule,
                "node": node,
                "target": change.target,
                "replaced": ", ".join(change.replaced),
                "formats": ", ".join(t.formats),
            }
            for t in manifest.transformations
            for change in t.changes
            for node in change.nodes
        ]
        columns = ("rule", "node", "target", "replaced", "formats")
        mlflow.log_table({key: [row[key] for row in rows] for key in columns}, "transformed_nodes.json")
        if config_text is not None:
            mlflow.log_text(config_text, "config.toml")
        mlflow.log_artifacts(str(folder), "bundle")
        mlflow.log_artifact(str(folder / REPORT))  # once more, where it is seen at once
        for artifact in manifest.artifacts:
            if artifact.format == "onnx":
                _log_onnx(mlflow, folder / artifact.path, manifest)


@contextlib.contextmanager
def tracking(config: TrackingConfig, folder: Path) -> Iterator[Tracker]:
    """Starts a run, and ends it as FINISHED or as FAILED, as the block ends.

    What could not be tracked is in `Tracker.failure`; nothing is raised for it, since the work itself may be good.
    """
    tracker = Tracker(config.uri if config.enabled else None, config.experiment, folder)
    try:
        yield tracker
    except BaseException as error:
        tracker.end(str(error) or type(error).__name__)
        raise
    tracker.end()


def download_model(uri: str, tracking: TrackingConfig, folder: Path, place: Path) -> Path:
    """Fetches a model from MLflow: a folder of transformers, or a ``.pt2`` file.

    Args:
        uri: ``models:/name@alias``, ``models:/name/version``, or ``runs:/id/path``.
        place: The folder to put it in.

    Raises:
        SourceError: It is not there, or is kept in a form that only running its code could load.
    """
    mlflow = _import_mlflow()
    mlflow.set_tracking_uri(resolved_uri(tracking.uri, folder))
    try:
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(place)))
        flavors = mlflow.models.Model.load(str(local)).flavors
    except Exception as error:  # as in Tracker
        raise SourceError(first_line(error), place=f"model.source: mlflow:{uri}") from error
    if "transformers" in flavors:
        model = local / str(flavors["transformers"].get("model_binary", "model"))
        for part in ("tokenizer", "processor", "image_processor", "feature_extractor"):
            # The flavour keeps them apart; a folder of transformers holds all.
            if (local / "components" / part).is_dir():
                shutil.copytree(local / "components" / part, model, dirs_exist_ok=True)
        return model
    pytorch = flavors.get("pytorch", {})
    saved = [*local.rglob("*.pt2")]
    if pytorch and saved and pytorch.get("serialization_format", "pt2") == "pt2":
        return saved[0]
    raise SourceError(
        f"it is kept as {', '.join(sorted(flavors))}, which only running its code could load",
        place=f"model.source: mlflow:{uri}",
        mend='Log it with mlflow.transformers, or with mlflow.pytorch and serialization_format="pt2".',
    )


def resolved_uri(uri: str, folder: Path) -> str:
    """A tracking URI whose relative SQLite path is taken from the config's folder, as all paths are."""
    path = uri.removeprefix("sqlite:///")
    if path == uri or path.startswith("/"):
        return uri
    return f"sqlite:///{(folder / path).resolve()}"


def _check_writable(uri: str) -> None:
    """Raises at once where mlflow would try for two minutes to open an SQLite file that cannot be written."""
    path = uri.removeprefix("sqlite:///")
    if path != uri:
        with contextlib.closing(sqlite3.connect(path.partition("?")[0], isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")


def git_tags(folder: Path) -> dict[str, str | None]:
    """The commit, branch and repository that a folder is in, under MLflow's names for them; else what CI says."""

    def ask(*command: str) -> str | None:
        # A container works in a folder of another user's, which git would otherwise not look at.
        git = ["git", "-c", "safe.directory=*", "-C", str(folder)]
        try:
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() or None if done.returncode == 0 else None

    def told(*names: str) -> str | None:
        return next((os.environ[name] for name in names if os.environ.get(name)), None)

    remote = ask("config", "--get", "remote.origin.url")
    branch = ask("rev-parse", "--abbrev-ref", "HEAD")
    return {
        "mlflow.source.git.commit": ask("rev-parse", "HEAD") or told("GITHUB_SHA", "CI_COMMIT_SHA"),
        # CI checks a commit out, not a branch.
        "mlflow.source.git.branch": (branch if branch != "HEAD" else None)
        or told("GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"),
        "mlflow.source.git.repoURL": redact(remote) if remote else None,
    }


def _import_mlflow() -> Any:
    # Without these, mlflow calls home, and waits minutes for a server that is down. A user's own setting stays.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # It prints the address of a run, password and all, into what may be our JSON.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow
    import mlflow.onnx

    return mlflow


def _page(uri: str, experiment_id: str, run_id: str) -> str:
    path = f"#/experiments/{experiment_id}/runs/{run_id}"
    if uri.startswith("http"):
        return f"{redact(uri).rstrip('/')}/{path}"
    # The program may have been called by its path, from an environment that the shell does not know.
    program = shutil.which("mlflow") or str(Path(sys.executable).with_name("mlflow"))
    return f"{program} ui --backend-store-uri {redact(uri)}\nhttp://127.0.0.1:5000/{path}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            text = redact(value if isinstance(value, str) else json.dumps(value))
            flat[f"{prefix}{key}"] = text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 3]}..."
    return flat


def _metrics(manifest: Manifest, seconds: Mapping[str, float]) -> dict[str, float]:
    metrics: dict[str, float] = {"nodes.before": manifest.nodes_before, "nodes.after": manifest.nodes_after}
    for transformation in manifest.transformations:
        rule = _key(".".join([*transformation.formats, transformation.rule]))
        metrics[f"{rule}.changes"] = len(transformation.changes)
        metrics[f"{rule}.near_misses"] = len(transformation.near_misses)
        metrics[f"{rule}.nodes_before"] = transformation.nodes_before
        metrics[f"{rule}.nodes_after"] = transformation.nodes_after
    for place in manifest.parity.places:
        for output in place.outputs:
            prefix = f"parity.{_key(place.place)}.{_key(output.output)}"
            values = output.model_dump(include={"max_abs", "multiple", "step", "cosine", "argmax_agreement"})
            metrics |= {f"{prefix}.{key}": value for key, value in values.items() if value is not None}
        for decision in place.decisions:
            prefix = ".".join(
                _key(part) for part in ("decisions", place.place, decision.output, decision.measure) if part
            )
            values = decision.model_dump(include={"value", "mean", "low", "high", "count", "ties"})
            metrics |= {f"{prefix}.{key}": value for key, value in values.items() if value is not None}
    for artifact in manifest.artifacts:
        if artifact.precision is not None:
            kept = [layer for layer in artifact.precision.layers if layer.kept is not None]
            metrics[f"precision.{artifact.format}.layers"] = len(artifact.precision.layers)
            metrics[f"precision.{artifact.format}.layers_kept"] = len(kept)
    for file in manifest.files:
        metrics[f"bytes.{_key(file.path)}"] = file.size
    for stage, spent in seconds.items():
        metrics[f"seconds.{_key(stage)}"] = spent
    return metrics


def _key(name: str) -> str:
    """A name in the characters that MLflow takes for metrics."""
    return re.sub(r"[^\w.\-/]+", "_", name)


def _log_onnx(mlflow: Any, path: Path, manifest: Manifest) -> None:
    import numpy as np
    import onnx
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(records: list[TensorRecord]) -> Schema:
        # A size that is not a number is dynamic, which MLflow writes as -1.
        return Schema(
            [
                TensorSpec(
                    np.dtype(_NUMPY_NAMES.get(r.dtype, r.dtype)),
                    tuple(size if isinstance(size, int) else -1 for size in r.shape),
                    r.name,
                )
                for r in records
            ]
        )

    mlflow.onnx.log_model(
        onnx.load(path),
        name="model",
        # A schema cannot be empty, and a model may take no inputs.
        signature=ModelSignature(schema(manifest.inputs) if manifest.inputs else None, schema(manifest.outputs)),
        # Named, because finding them out would load the model in a process of its own.
        pip_requirements=[f"{name}=={manifest.versions[name]}" for name in ("onnx", "onnxruntime", "mlflow")],
        onnx_execution_providers=["CPUExecutionProvider"],
        metadata={"optexport_version": manifest.optexport_version, "weights_sha256": manifest.model.weights_sha256},
    )
