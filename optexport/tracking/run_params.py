"""Params and tags of a run, with names and values that MLflow accepts."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from optexport.bundle.measurements import Origin
from optexport.redaction import redact

T = TypeVar("T")

_LONGEST_PARAM = 500
# MLflow's limits for the names of params. Metric names here also exclude spaces and colons.
_LONGEST_NAME = 250
_PARAM_CHARACTERS, METRIC_CHARACTERS = r"\w.\-/: ", r"\w.\-/"
# Tag with the versions of Python and of packages.
VERSIONS_TAG = "optexport.versions"
_GIT_TAGS = {
    "commit": "mlflow.source.git.commit",
    "branch": "mlflow.source.git.branch",
    "repository": "mlflow.source.git.repoURL",
}


def tags(source: str, formats: Sequence[str], versions: Mapping[str, str], origin: Origin) -> dict[str, str]:
    """Returns the tags that describe the origin of a bundle.

    Tags for programs start with ``optexport.`` or ``mlflow.``; a reader sees the others first.
    """
    part = {} if origin.part is None else {"part": origin.part}
    commit = {tag: origin.git[key] for key, tag in _GIT_TAGS.items() if key in origin.git}
    return {
        "source": source,
        "formats": ", ".join(formats),
        **part,
        VERSIONS_TAG: ", ".join(f"{name} {version}" for name, version in versions.items()),
        "mlflow.source.name": "optexport",
        "mlflow.source.type": "LOCAL",
        **commit,
    }


def params(values: Mapping[str, Any]) -> dict[str, str]:
    """Flattens nested settings into params.

    Long values are cut, because the full config is an artifact of the run.
    """
    return valid_names(dict(_flatten(values)), _PARAM_CHARACTERS)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            text = redact(value if isinstance(value, str) else json.dumps(value))
            yield f"{prefix}{key}", text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 3]}..."


def valid_names(values: Mapping[str, T], characters: str) -> dict[str, T]:
    """Replaces invalid characters in the names of values and keeps the names unique."""

    def replaced(name: str) -> str:
        return "/".join(part for part in re.sub(f"[^{characters}]+", "_", name).split("/") if part.strip("."))

    shared = Counter(map(replaced, values))

    def final(name: str) -> str:
        text = replaced(name)
        if len(text) <= _LONGEST_NAME and (text == name or shared[text] == 1):
            return text
        digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
        return f"{text[: _LONGEST_NAME - 9]}-{digest}"

    return {final(name): value for name, value in values.items()}
