"""The config as a bundle and an MLflow run record it: without secrets and absolute paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optexport.config.schema import Config
from optexport.redaction import redact


def portable_config(config: Config) -> dict[str, Any]:
    """Returns the resolved config as JSON, without secrets and without absolute paths."""
    document = config.model_dump(mode="json", exclude_none=True)
    document["transformations"] = [rule.model_dump(mode="json") for rule in config.rules()]
    for table in ("model", "tracking"):
        document[table] = _redacted(document[table])
    for table, key in (("model", "source"), ("export", "output"), ("inputs", "data")):
        value = document[table].get(key)
        if value is not None and Path(value).is_absolute():
            document[table][key] = Path(value).name
    if document["tracking"].get("uri", "").startswith("sqlite:////"):
        document["tracking"]["uri"] = f"sqlite:///{Path(document['tracking']['uri']).name}"
    return document


def _redacted(value: Any) -> Any:
    """Removes the secrets of URIs from a nested value."""
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value
