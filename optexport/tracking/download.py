"""Downloads of models from MLflow."""

from __future__ import annotations

import shutil
from pathlib import Path

from optexport.config.schema import TrackingConfig
from optexport.config.source import is_template
from optexport.errors import ConfigError, SourceError, first_line
from optexport.tracking.store import import_mlflow, open_store


def download_model(uri: str, tracking: TrackingConfig, folder: Path, location: Path) -> Path:
    """Downloads a model from MLflow: a transformers folder or a ``.pt2`` file.

    Args:
        uri: ``models:/name@alias``, ``models:/name/version``, or ``runs:/id/path``.
        folder: The start of a relative path in the tracking URI.
        location: The folder to download to.

    Raises:
        ConfigError: The URI is a template for many models.
        SourceError: The model does not exist, or loading it would run its own code.
    """
    if is_template(f"mlflow:{uri}"):
        raise ConfigError(
            "{name} and {version} are placeholders for the models of a registry",
            location=f"model.source: mlflow:{uri}",
            hint="Run: optexport batch CONFIG --from-registry FILTER",
        )
    mlflow = import_mlflow()
    try:
        open_store(tracking.store, folder)
        local = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(location)))
        loaded = mlflow.models.Model.load(str(local)).flavors
        flavors = {str(name): dict(flavor or {}) for name, flavor in dict(loaded).items()}
    except Exception as error:  # mlflow, SQLAlchemy, requests and the file system each raise their own errors
        raise SourceError(first_line(error), location=f"model.source: mlflow:{uri}") from error
    if "transformers" in flavors:
        model = _within(local, flavors["transformers"].get("model_binary", "model"), uri)
        for part in ("tokenizer", "processor", "image_processor", "feature_extractor"):
            # MLflow stores these in separate folders; transformers expects a single one.
            if (local / "components" / part).is_dir():
                try:
                    shutil.copytree(local / "components" / part, model, dirs_exist_ok=True)
                except OSError as error:  # for example if model_binary names this folder
                    raise SourceError(
                        f"the {part} of the model cannot be copied next to the weights",
                        location=f"model.source: mlflow:{uri}",
                    ) from error
        return model
    pytorch = flavors.get("pytorch", {})
    if pytorch and pytorch.get("serialization_format", "pt2") == "pt2":
        files = [*_within(local, pytorch.get("model_data", "data"), uri).rglob("*.pt2")]
        if len(files) == 1:
            return files[0]
    raise SourceError(
        f"loading this model would run its own code (found flavors: {', '.join(sorted(flavors)) or 'none'})",
        location=f"model.source: mlflow:{uri}",
        hint='Log the model with mlflow.transformers, or with mlflow.pytorch and serialization_format="pt2".',
    )


def _within(local: Path, part: object, uri: str) -> Path:
    """Returns the resolved folder of a model's part, which must lie inside the download."""
    try:
        folder = (local / str(part)).resolve()
    except ValueError as error:  # for example a null byte
        raise SourceError(
            f"the model names an invalid path, {part!r}: {error}", location=f"model.source: mlflow:{uri}"
        ) from error
    if not folder.is_relative_to(local.resolve()):
        raise SourceError(
            f"the model names weights outside of its folder: {folder}", location=f"model.source: mlflow:{uri}"
        )
    return folder
